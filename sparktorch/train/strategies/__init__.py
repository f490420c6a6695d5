"""How the ranks share the work: one file per strategy, registered in `registry`."""
