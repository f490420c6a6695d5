"""The kinds of columns: how a rank stores one, and what it passes to `forward`."""
