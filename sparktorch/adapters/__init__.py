"""What other libraries have conventions for: their models, trained and scored as modules, and their data sets, read."""
