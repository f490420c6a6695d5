"""The Params: `tables` declares them by subject, `classes` by class; `declare` makes the base classes in `mixins`."""
