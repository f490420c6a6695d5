"""Series of rows in time: even steps, modules of windows, their training step, and forecasts. Without Spark."""
