"""Searches over Params: folds in the ranks; Optuna's trials on groups of ranks."""
