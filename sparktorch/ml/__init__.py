"""Spark ML idioms: Params, estimators, models, persistence."""
