"""Scoring besides `transform`: evaluation, single rows, metadata of the output columns."""
