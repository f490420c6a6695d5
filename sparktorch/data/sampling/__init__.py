"""Which row is trained at which step, from row keys alone."""
