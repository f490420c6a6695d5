"""The Params: `tables` declares them; `declare` turns the tables into the base classes in `mixins`."""
