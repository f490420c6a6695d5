"""Searches over settings of Params: the space, the trials on groups of ranks, the best model."""
