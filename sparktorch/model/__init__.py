"""A trained module as a value: saving, loading and scoring, without Spark."""
