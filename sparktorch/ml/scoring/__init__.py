"""What models offer besides `transform`: evaluation, single rows, metadata of output columns."""
