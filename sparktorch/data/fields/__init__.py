"""The kinds of columns: how a rank stores each, and what it passes to `forward`."""
