"""A DataFrame prepared for training: columns checked and encoded, rows keyed and partitioned by rank."""
