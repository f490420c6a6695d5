"""The Params: `tables` declares them, `mixins` has them as base classes, `declare` makes one of the other."""
