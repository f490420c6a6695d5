"""Losses and metrics of rankings, over the groups of a batch at once."""
