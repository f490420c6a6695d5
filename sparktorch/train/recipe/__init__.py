"""How module, loss, optimizer and schedule are made, and tried on one row."""
