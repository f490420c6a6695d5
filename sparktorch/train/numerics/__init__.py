"""Numerical options of a training: weight averages, batch normalisation, determinism, NaN losses."""
