"""Prepares a DataFrame for training: checks and encodes columns, adds row keys, and partitions rows by rank."""
