"""LightningModules: their steps, optimizers, logged values and hooks as the parts of a training."""
