"""Training in one rank: the loop and its parts. Nothing here depends on Spark or on row formats."""
