"""A server that can be away: a TCP proxy in front of it, which refuses, stalls or passes what comes."""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress
from typing import Literal

__all__ = ["Proxy", "free_port"]

_CHUNK = 1 << 16


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Proxy:
    """Stands in front of a local port.

    `refuse`: nobody listens. `stall`: connections are taken, and nothing is ever answered.
    `pass`: everything goes through.
    """

    def __init__(self, target: int) -> None:
        """Refuses at first.

        Args:
            target: The port of the server.
        """
        self.port = free_port()
        self.taken = 0  # connections
        self._target = target
        self._mode: Literal["refuse", "stall", "pass"] = "refuse"
        self._listener: socket.socket | None = None
        self._connections: list[socket.socket] = []

    def set(self, mode: Literal["refuse", "stall", "pass"]) -> None:
        """Goes into another mode; connections of the mode before are cut."""
        self.close()
        self._mode = mode
        if mode != "refuse":
            self._listener = socket.create_server(("127.0.0.1", self.port))
            threading.Thread(target=self._accept, args=(self._listener, mode), daemon=True).start()

    def close(self) -> None:
        """Cuts all connections and listens no more."""
        for one in (self._listener, *self._connections):
            if one is not None:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        self._listener, self._connections = None, []

    def _accept(self, listener: socket.socket, mode: str) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                self.taken += 1
                self._connections.append(client)
                if mode == "pass":
                    server = socket.create_connection(("127.0.0.1", self._target))
                    self._connections.append(server)
                    for source, sink in ((client, server), (server, client)):
                        threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with closing(sink), suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
