"""Estimators that prepare rows for one kind of task: tables, recommendations, series, ranking."""
