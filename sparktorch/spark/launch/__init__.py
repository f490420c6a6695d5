"""The barrier job and its tasks."""
