"""The barrier job and its tasks, the ranks."""
