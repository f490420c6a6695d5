"""Training in one rank: the loop, and all it is made of. Neither Spark nor rows are known here."""
