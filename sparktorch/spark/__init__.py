"""The Spark engine: sessions, DataFrames, barrier jobs and scoring. Imports no training code."""
