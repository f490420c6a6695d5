"""A store with signed values: a reader knows that the writer had the attempt's token."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import resource
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sparktorch.base.no_op import no_op
from sparktorch.errors import ClusterError, ConfigError

__all__ = ["UNREACHED_HINT", "OpenStore", "Rendezvous", "SealedStore", "allow_connections", "connect", "host_store"]

# A rank gives up a store that it has not reached within this time.
_REACH_SECONDS = 10.0
_STORE_TIMEOUT = timedelta(seconds=60)
_PIECE_BYTES = 4 << 20  # Torch's store refuses values larger than 8 MiB.

UNREACHED_HINT = (
    "open the ephemeral ports of its host to the executors, set spark.driver.host to an address they reach, or let a "
    "rank host it with rendezvous='rank0'"
)

_SEAL_LENGTH = 32
# A rank has two connections, one of them for its heartbeats; in a pool it has them for two tasks at a time.
_CONNECTIONS = 4
# This process needs at most this number of open files for its session, libraries and data.
_OTHER_FILES = 512
# The store answers with this text where it has no value. No signed value is as short.
_NOTHING = "-"
_PORTS = "SPARKTORCH_PORTS"

# Opens a connection; with the keyword `token`, the connection is for values that are signed with that token.
OpenStore = Callable[..., "SealedStore"]


class SealedStore(dist.PrefixStore):
    """A store whose values are signed: each carries an HMAC over key and value.

    Any process that reaches a `TCPStore` can list and overwrite its keys. Keys therefore have a prefix that is derived
    from the token and does not reveal it. Counters, and values that torch itself writes, are not signed.
    """

    def __init__(self, token: str, store: dist.Store) -> None:
        """Takes the attempt's token, which its ranks know, and the store to wrap."""
        super().__init__(hashlib.sha256(token.encode()).hexdigest()[:_SEAL_LENGTH], store)
        self._token = token.encode()

    def set(self, key: str, value: str | bytes) -> None:
        """Signs and writes a value."""
        content = value.encode() if isinstance(value, str) else value
        super().set(key, self._seal(key, content) + content)  # type: ignore[arg-type]  # Torch takes bytes as well.

    def claim(self, key: str, value: str) -> None:
        """Signs and writes a value, unless the key has a value."""
        super().compare_set(key, "", self._seal(key, value.encode()).decode() + value)

    def get(self, key: str) -> bytes:
        """Returns a value; a `ClusterError` says that it was written without the attempt's token."""
        return self._open_seal(key, super().get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns several values; raises what `get` does."""
        values = super().multi_get(list(keys)) if keys else []
        return [self._open_seal(key, value) for key, value in zip(keys, values, strict=True)]

    def read_all(self, keys: Sequence[str]) -> list[Any]:
        """Returns several JSON values, parsed; raises what `get` does."""
        return [json.loads(value) for value in self.multi_get(keys)]

    def peek(self, key: str) -> bytes | None:
        """Returns a value, `None` while there is none; raises what `get` does.

        It takes one message, where a check and `get` would take three: the store answers a swap with its value or, if
        it lacks the key, with the value that the swap expects.
        """
        value = super().compare_set(key, _NOTHING, _NOTHING)
        return None if value == _NOTHING.encode() else self._open_seal(key, value)

    def set_pieces(self, key: str, content: bytes, moved: Callable[[], object] = no_op) -> int:
        """Writes a value of any size in pieces that the store takes, under `key/0` and so on; returns their number.

        `moved` is called after each piece.
        """
        starts = range(0, len(content), _PIECE_BYTES)
        for number, start in enumerate(starts):
            self.set(f"{key}/{number}", content[start : start + _PIECE_BYTES])
            moved()
        return len(starts)

    def get_pieces(self, key: str, count: int) -> bytes:
        """Returns a value that `set_pieces` has written; raises what `get` does."""
        return b"".join(self.multi_get([f"{key}/{number}" for number in range(count)]))

    def token_of(self, task: int) -> str:
        """Returns the token for a pool's task, which nobody can derive without this store's token."""
        return hmac.new(self._token, f"task {task}".encode(), hashlib.sha256).hexdigest()[:_SEAL_LENGTH]

    def _seal(self, key: str, value: bytes) -> bytes:
        """Returns the signature of a value under a key."""
        message = key.encode() + b"\0" + value
        return hmac.new(self._token, message, hashlib.sha256).hexdigest()[:_SEAL_LENGTH].encode()

    def _open_seal(self, key: str, sealed: bytes) -> bytes:
        """Returns a value without its signature, which it checks."""
        seal, value = sealed[:_SEAL_LENGTH], sealed[_SEAL_LENGTH:]
        if not hmac.compare_digest(seal, self._seal(key, value)):
            raise ClusterError(
                f"somebody else has written {key!r} into the store at which the ranks meet",
                hint="let only the driver and the executors reach its port: see docs/security.md",
            )
        return value


@dataclass(frozen=True)
class Rendezvous:
    """Address and token of one attempt's store.

    Attributes:
        host: The host at which ranks reach the store.
        port: The store's port.
        prefix: The random token. The prefix of keys and the signatures are derived from it, which keeps out strangers,
            and ranks of other attempts.
    """

    host: str
    port: int
    prefix: str


def host_store(bind: str) -> tuple[dist.TCPStore, int]:
    """Hosts a store on one address and a free port; returns the store and the port.

    The environment variable `SPARKTORCH_PORTS`, such as `40000-40031`, names the ports to choose from; an `OSError`
    says that no port is free. The socket is bound here and handed over to torch, so that no other process can take the
    port in between, and the store listens on this address only.
    """
    family, _, _, _, address = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0]
    listener = _listen(str(address[0]), family)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        str(address[0]),
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _listen(host: str, family: int) -> socket.socket:
    """Listens on the first free port in the range; raises the error of the last port if no port is free."""
    ports = os.environ.get(_PORTS, "0")
    first, _, last = ports.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"{_PORTS}={ports!r} is no range of ports", hint="write it as 40000-40031")
    for port in range(int(first), int(last)):
        with suppress(OSError):
            return socket.create_server((host, port), family=family, backlog=1024)
    return socket.create_server((host, int(last)), family=family, backlog=1024)


def allow_connections(ranks: int) -> None:
    """Raises the number of files that this process may open, to hold the connections of all ranks.

    Many systems allow a process 1,024 files at first. A `ClusterError` says that the limit cannot be raised so far.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _CONNECTIONS * ranks + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and files > hard:
        raise ClusterError(
            f"{ranks:,} ranks need {files:,} open files of this process, which may have {hard:,}",
            hint="raise its limit (ulimit -Hn, or LimitNOFILE of its service), or set a smaller numWorkers",
            param="numWorkers",
        )
    if soft != resource.RLIM_INFINITY and files > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def connect(host: str, port: int, token: str) -> SealedStore:
    """Connects to the store of an attempt; keys get the attempt's prefix, which is derived from `token`.

    A `DistNetworkError` says within ten seconds that nothing listens there; torch alone would try until its time-out.
    The time-out is long because torch looks up the name of the address, which takes 5 s or more for each name server
    that does not answer.
    """
    try:
        socket.create_connection((host, port), timeout=_REACH_SECONDS).close()
    except OSError as error:
        raise dist.DistNetworkError(f"{host}:{port}: {error}") from error
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    return SealedStore(token, store)
