"""A trained module as a value: to save, to load, to score with. Spark is not needed for it."""
