"""Classifiers and regressors of tables as they are: categories, numbers and times."""
