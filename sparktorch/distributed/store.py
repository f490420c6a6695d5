"""Values in a store that others may reach: what is read was written by somebody who knows the attempt's token."""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from sparktorch.errors import ClusterError

__all__ = ["Rendezvous", "SealedStore", "connect", "host_store"]

_SEAL_LENGTH = 32


class SealedStore(dist.PrefixStore):
    """A store whose values carry a seal over key and value.

    The keys lie under a prefix that follows from the token and does not show it: whoever reaches a `TCPStore` can have
    all keys listed, and overwrite them. Counters, and what torch itself lays down through the store, carry no seal.
    """

    def __init__(self, token: str, store: dist.Store) -> None:
        """Takes the token that the ranks of the attempt have been given, and the store."""
        super().__init__(hashlib.sha256(token.encode()).hexdigest()[:_SEAL_LENGTH], store)
        self._token = token.encode()

    def set(self, key: str, value: str) -> None:
        """Lays down a value."""
        super().set(key, self._seal(key, value.encode()).decode() + value)

    def get(self, key: str) -> bytes:
        """Returns a value.

        Raises:
            ClusterError: Somebody else has written it.
        """
        return self._opened(key, super().get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns several values; raises what `get` does."""
        return [self._opened(key, value) for key, value in zip(keys, super().multi_get(list(keys)), strict=True)]

    def _seal(self, key: str, value: bytes) -> bytes:
        message = key.encode() + b"\0" + value
        return hmac.new(self._token, message, hashlib.sha256).hexdigest()[:_SEAL_LENGTH].encode()

    def _opened(self, key: str, sealed: bytes) -> bytes:
        seal, value = sealed[:_SEAL_LENGTH], sealed[_SEAL_LENGTH:]
        if not hmac.compare_digest(seal, self._seal(key, value)):
            raise ClusterError(
                f"somebody else has written {key!r} into the store at which the ranks meet",
                hint="let only the driver and the executors reach its port: see docs/security.md",
            )
        return value


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one attempt meet.

    Attributes:
        host: Name or address of the store's host, as the ranks reach it.
        port: Its TCP port.
        prefix: Random token from which prefix and seal of the attempt's keys follow, so that ranks of another
            attempt, and strangers, cannot meddle.
    """

    host: str
    port: int
    prefix: str


def host_store(bind: str) -> tuple[dist.TCPStore, int]:
    """Hosts a store on one address and a free port; returns the store and the port.

    The socket is bound here and handed over, so there is no moment in which somebody else could
    take the port, and it listens on this one address instead of on all.
    """
    family, _, _, _, address = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        str(address[0]),
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect(host: str, port: int, token: str, *, timeout: timedelta = timedelta(seconds=60)) -> dist.Store:
    """Connects to the store of a job attempt; keys live under the attempt's own prefix, which follows from `token`."""
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return SealedStore(token, store)
