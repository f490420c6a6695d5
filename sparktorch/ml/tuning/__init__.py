"""Searches for the best Params."""
