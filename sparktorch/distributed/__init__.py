"""Communication around the training: process group, store, heartbeats and failure diagnosis.

Ranks use `client`, the driver uses `server` and `monitor`, and `root_cause` decides which error `fit` raises. Nothing
here imports Spark.
"""
