"""Whether the cluster can run a fit: settings, slots, GPUs, and what executors have installed."""
