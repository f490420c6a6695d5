"""Converts Arrow columns to NumPy arrays, and checks their rows."""
