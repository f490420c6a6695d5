"""From Arrow batches to the micro-batches of a rank. No pyspark, no mlflow."""
