"""The state of a training as files that any number of ranks can resume from."""
