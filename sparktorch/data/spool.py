"""Where a shard keeps its rows: arrays that are appended to piece by piece, and read as one."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["InMemory", "Spool", "Spooler"]


class Spool(Protocol):
    """Rows of one dtype and shape: appended piece by piece, read as one array."""

    @property
    def nbytes(self) -> int:
        """Bytes appended so far."""
        ...

    def append(self, values: npt.NDArray[Any]) -> None:
        """Adds rows, an array of shape `(rows, *shape)`; it may be read-only and is not kept longer than needed."""
        ...

    def finish(self) -> npt.NDArray[Any]:
        """Returns all rows as one array of shape `(rows, *shape)` that nobody else writes to; called once."""
        ...


class Spooler(Protocol):
    """A place for spools."""

    def spool(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> Spool:
        """Returns an empty spool.

        Args:
            name: Names it among the spools of a shard.
            dtype: Of its elements.
            shape: Of one row.
        """
        ...


class InMemory:
    """Keeps rows in memory."""

    def spool(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> Spool:
        """Returns an empty spool; see `Spooler.spool`."""
        return _MemorySpool(np.dtype(dtype), shape)


class _MemorySpool:
    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        # An empty piece, so that there is always something of the dtype and shape to concatenate.
        self._parts: list[npt.NDArray[Any]] = [np.empty((0, *shape), dtype)]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def append(self, values: npt.NDArray[Any]) -> None:
        self._parts.append(values)

    def finish(self) -> npt.NDArray[Any]:
        # Concatenating also makes the one private, writable copy; the Arrow buffers that the pieces
        # may share are let go.
        parts, self._parts = self._parts, []
        return np.concatenate(parts)
