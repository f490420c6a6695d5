"""Forecasts of time series."""
