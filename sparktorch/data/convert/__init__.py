"""Arrow columns to NumPy arrays, the checks on the way, and the `preprocess` of a user."""
