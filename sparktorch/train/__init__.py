"""The training engine: what is trained, how ranks share the work, and the loop. No pyspark."""
