"""Numerical options of a training: weight averages, batch normalisation, memory formats, determinism."""
