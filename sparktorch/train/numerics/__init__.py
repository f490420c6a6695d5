"""What changes the numbers of a training: averages, batch normalisation, memory formats, determinism."""
