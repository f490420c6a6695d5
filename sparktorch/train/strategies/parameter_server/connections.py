"""Connections between ranks for messages whose size both ends know.

Gloo's own `send` and `recv` do not suit threads that must end: they do not return if the connection closes
in the middle of a message, and nothing else can wake a thread that waits in them.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress

import torch
import torch.distributed as dist

from sparktorch.base.world import World

__all__ = ["Connection", "connect"]

_CONNECT_SECONDS = 60
_HELLO_SECONDS = 5
_TOKEN_BYTES = 16
# A connection to a host that has vanished fails after a minute and a half.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Connection:
    """One end of a connection. One thread sends and receives; any thread may shut it down."""

    def __init__(self, end: socket.socket) -> None:
        """Takes a connected socket."""
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._end = end

    def send(self, message: torch.Tensor) -> None:
        """Sends a uint8 tensor in host memory; raises a `DistNetworkError` if the connection is closed."""
        with _closed_by_peer():
            self._end.sendall(message.numpy().data)

    def receive(self, message: torch.Tensor) -> None:
        """Waits for a message, as `send` sends it, and fills a uint8 tensor in host memory with it."""
        left = message.numpy().data
        with _closed_by_peer():
            while left:
                count = self._end.recv_into(left)
                if not count:
                    raise ConnectionError("end of file")
                left = left[count:]

    def shut(self) -> None:
        """Shuts the connection down: its thread gets an error if it waits, and must close the connection."""
        with suppress(OSError):  # closed already
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; only this ends a peer's `send` that waits for buffer space."""
        self._end.close()


@contextmanager
def _closed_by_peer() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise dist.DistNetworkError(f"Connection closed by peer: {error}") from error


def connect(world: World, servers: Sequence[int]) -> tuple[dict[int, Connection], dict[int, Connection]]:
    """Connects every rank with every server but itself; each rank calls it, with the default group open.

    Returns:
        This rank's connections to servers, and its connections to the ranks that it serves, each by rank.
    """
    token, serves = secrets.token_bytes(_TOKEN_BYTES), world.rank in servers
    family = socket.AF_INET6 if ":" in world.address else socket.AF_INET
    places = [""] * world.world_size
    with closing(socket.socket(family)) as listener:
        if serves:
            listener.bind((world.address, 0))
            listener.listen(world.world_size)
        place = f"{world.address or socket.gethostname()} {listener.getsockname()[1]} {token.hex()}"
        dist.all_gather_object(places, place)
        ups = {server: _call(places[server], world.rank) for server in servers if server != world.rank}
        return ups, _accept(listener, token, world.world_size - 1) if serves else {}


def _call(place: str, rank: int) -> Connection:
    host, port, token = place.split()
    end = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
    end.sendall(bytes.fromhex(token) + rank.to_bytes(4, "big"))
    return Connection(end)


def _accept(listener: socket.socket, token: bytes, count: int) -> dict[int, Connection]:
    """Accepts the connections of `count` ranks, by rank; closes connections without the token."""
    lines: dict[int, Connection] = {}
    listener.settimeout(_CONNECT_SECONDS)
    while len(lines) < count:
        end, _ = listener.accept()
        end.settimeout(_HELLO_SECONDS)
        hello = b""
        with suppress(OSError):  # the peer has left, or sends nothing
            hello = end.recv(len(token) + 4, socket.MSG_WAITALL)
        if len(hello) == len(token) + 4 and secrets.compare_digest(hello[: len(token)], token):
            lines[int.from_bytes(hello[len(token) :], "big")] = Connection(end)
        else:
            end.close()
    return lines
