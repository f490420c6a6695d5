"""The rows of one rank as a data set: its batches, from memory or disk, and their way to the device."""
