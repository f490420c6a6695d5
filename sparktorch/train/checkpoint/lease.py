"""Leases on directories: one attempt of one fit may write at a time."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any

from sparktorch.errors import PersistenceError
from sparktorch.train.checkpoint.directory import Directory

__all__ = ["CLAIM", "Lease", "claim_in"]

CLAIM = "claim.json"

_CLAIM_SECONDS = 30.0  # after which a lease expires if it is not renewed


class Lease:
    """The right to write into a directory; its holder renews it every few seconds.

    A later attempt of the same fit takes the lease over from an earlier one, whose processes may still run. If the
    earlier one has checked before that and then renews, the later one takes the lease over again.
    """

    def __init__(self, directory: Directory, owner: str, attempt: str = "", restart: int = 0) -> None:
        """Acquires the lease of a fit's attempt; of attempts with as many starts (`restart`) before, the last gets it.

        A `PersistenceError` says that another fit holds one that has not expired, or a later attempt holds one. Some
        file systems raise other exceptions than `OSError` when writing fails.
        """
        self._directory, self._owner, self._attempt, self._restart = directory, owner, attempt, restart
        there = claim_in(self._directory)
        if there is None:
            with suppress(FileExistsError):
                self._write(new=True)
                return
            there = claim_in(self._directory) or {}  # another fit has acquired it meanwhile
        if there.get("owner") == owner and there["restart"] > restart:
            raise self._lost(there)
        age = time.time() - there.get("time", 0)
        if there.get("owner", owner) != owner and age < _CLAIM_SECONDS:
            raise PersistenceError(
                f"{directory.url} is being written by another fit, {age:.0f} s ago from {there['host']}",
                hint="give each fit a directory of its own; if that fit is dead, try again in "
                f"{_CLAIM_SECONDS - age:.0f} s",
                param="checkpointDir",
                code="ST-CHECKPOINT-BUSY",
            )
        self._write()

    def renew(self) -> None:
        """Renews the lease; a `PersistenceError` says that another fit, or a later attempt of this one, holds it."""
        self.check()
        self._write()

    def check(self) -> None:
        """Checks that nobody else holds the lease, otherwise raises a `PersistenceError`."""
        there = claim_in(self._directory)
        if not there or (there["owner"], there["attempt"]) == (self._owner, self._attempt):
            return
        if there["owner"] != self._owner or there["restart"] >= self._restart:
            raise self._lost(there)

    def _lost(self, there: dict[str, Any]) -> PersistenceError:
        return PersistenceError(
            f"{self._directory.url} was taken by another fit from {there['host']}, or by a later attempt of this "
            f"one, while it had not said for {_CLAIM_SECONDS:.0f} s that it writes there",
            hint="give each fit a directory of its own",
            param="checkpointDir",
            code="ST-CHECKPOINT-BUSY",
        )

    def _write(self, *, new: bool = False) -> None:
        claim = {
            "owner": self._owner,
            "attempt": self._attempt,
            "restart": self._restart,
            "time": time.time(),
            "host": socket.gethostname(),
        }
        self._directory.put(CLAIM, json.dumps(claim).encode(), new=new)


def claim_in(directory: Directory) -> dict[str, Any] | None:
    """Returns the lease on a directory; `None` if there is none, an empty dict if it cannot be read."""
    try:
        there = json.loads(directory.read(CLAIM))
        numbers = {"restart": int(there["restart"]), "time": float(there["time"])}
        return {**{name: str(there[name]) for name in ("owner", "attempt", "host")}, **numbers}
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        return {}
