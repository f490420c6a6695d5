"""The life of ranks beside the training: process group, store, heartbeats, and why a rank failed.

A rank speaks through `client`, the driver listens with `server` and `monitor`, and `root_cause` decides what `fit`
raises. Neither end imports Spark.
"""
