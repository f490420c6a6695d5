"""Builds module, loss, optimizer and schedule, and tries them on one row."""
