"""Data sets of Petastorm, read without it."""
