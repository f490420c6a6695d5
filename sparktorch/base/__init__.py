"""What every layer uses: configuration, the place of a rank, devices, state dicts as bytes."""
