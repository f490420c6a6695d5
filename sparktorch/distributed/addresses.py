"""Hosts and addresses. The cluster check ships this module by value, so it imports the standard library only."""

from __future__ import annotations

import re
import socket
from contextlib import suppress

__all__ = ["address_towards", "host_of"]


def host_of(address: str) -> str:
    """Returns the host of `host`, `host:port` or `[v6]:port`."""
    matched = re.fullmatch(r"\[?(.*?)\]?(?::\d+)?", address)
    assert matched is not None
    return matched[1]


def address_towards(host: str) -> str:
    """Returns the local IPv4 address from which `host` is reached; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 9))  # Connecting a datagram socket sends nothing.
        return str(probe.getsockname()[0])
    return ""
