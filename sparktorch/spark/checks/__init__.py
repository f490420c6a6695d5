"""Checks whether the cluster can run a fit: settings, slots, GPUs, networks, and packages on executors."""
