"""Asynchronous training: ranks push gradients to shares of the parameters over sockets."""
