"""The rows of one rank as a data set: batches from memory or disk, and their transfer to the device."""
