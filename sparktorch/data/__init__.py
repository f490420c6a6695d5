"""Turns the columns of a DataFrame into the batches of a rank. Imports neither Spark nor training code."""
