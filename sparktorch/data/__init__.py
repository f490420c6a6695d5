"""Columns of a DataFrame become the batches of a rank. Neither Spark nor training code is imported here."""
