"""Modules that every layer uses: configuration, a rank's `World`, batches, devices, state dicts as bytes."""
