"""Parameters sharded among ranks: the units that are gathered, and checks that ranks use the same ones."""
