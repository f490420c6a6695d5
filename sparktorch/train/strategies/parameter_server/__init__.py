"""Asynchronous training: ranks push gradients over sockets to servers, each with a share of the parameters."""
