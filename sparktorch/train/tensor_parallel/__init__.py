"""Layers divided among ranks that compute on the same rows: which, how, and what these ranks exchange."""
