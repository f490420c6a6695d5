"""Sampling: which row is trained at which step, computed from row keys."""
