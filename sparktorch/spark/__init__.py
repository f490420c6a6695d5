"""Spark as the distributed engine: frames in, barrier tasks out. No training code."""
