"""How the ranks share the work: one file a strategy, registered in `registry`."""
