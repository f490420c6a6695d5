"""The engine: sessions, DataFrames, barrier jobs and scoring. No training code is imported here."""
