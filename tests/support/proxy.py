"""A server that can be away: a TCP proxy in front of it, which refuses, stalls or passes what comes."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from contextlib import closing, suppress
from typing import Literal

_CHUNK = 1 << 16


def free_port() -> int:
    """Returns a port that nobody listens on, and that the system gives to no socket which asks for any port."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)  # ports for any socket begin above
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Proxy:
    """Stands in front of a port: nobody listens ("refuse"), nothing is answered ("stall"), or all passes, late."""

    def __init__(self, target: int, *, delay: float = 0.0) -> None:
        self.port = free_port()
        self.taken = 0  # connections
        self._target, self._delay = target, delay
        self._flowing = threading.Event()
        self._flowing.set()
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

    def hold(self) -> None:
        """Lets nothing through until `release`, and leaves connections as they are."""
        self._flowing.clear()

    def release(self) -> None:
        """Lets everything through again."""
        self._flowing.set()

    def close(self) -> None:
        """Cuts all connections and listens no more."""
        self._flowing.set()
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
                        threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with closing(sink), suppress(OSError):
            while data := source.recv(_CHUNK):
                time.sleep(self._delay)
                self._flowing.wait()
                sink.sendall(data)
