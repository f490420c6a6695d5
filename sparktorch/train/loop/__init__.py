"""The training of one rank: its loop, its steps, validation, progress, and the weights that it returns."""
