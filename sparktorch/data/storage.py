"""Row storage of a shard: arrays that are appended to in pieces, and read as a whole or in runs.

Rows on disk are read with `preadv`, not mapped: file pages do not count as process memory, and a failing
disk raises an exception instead of a signal. All spools share one file, because open files are limited.
The file is unlinked: no other process can truncate it, and the kernel frees it when the process ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from sparktorch.data.runs import Runs
from sparktorch.errors import ClusterError

__all__ = ["InMemory", "OnDisk", "RowStorage", "Spool", "WithinBudget", "local_directory"]

Array = npt.NDArray[Any]

_LEAST_GROWTH = 1 << 20  # bytes
_HUGE_PAGE = 2 << 20  # bytes of one, on most machines
_HUGE = 2 * _HUGE_PAGE  # bytes from which on huge pages are worth it
_FIRST_EXTENT = 1 << 20  # bytes
_MOST_AT_ONCE = 1 << 30  # bytes: macOS refuses 2 GiB
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Spool(Protocol):
    """Append-only storage for rows of one dtype and shape."""

    @property
    def nbytes(self) -> int:
        """Bytes appended so far."""
        ...

    def append(self, values: Array) -> None:
        """Appends an array of shape `(rows, *shape)`, which may be read-only; copies it."""
        ...

    def finish(self) -> Array:
        """Returns all rows as one writable array of shape `(rows, *shape)`; can be called once."""
        ...

    def read(self, runs: Runs) -> Array:
        """Returns a copy of the rows in `runs`, in their order; can be called repeatedly, but not after `finish`."""
        ...


class RowStorage(Protocol):
    """Creates spools in memory or on disk."""

    @property
    def on_disk(self) -> bool:
        """Whether the appended rows are on disk."""
        ...

    def spool(self, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> Spool:
        """Returns an empty spool of elements of `dtype`, and of rows of `shape`."""
        ...

    def close(self) -> None:
        """Frees the rows on disk."""
        ...


class InMemory:
    """Keeps rows in memory."""

    on_disk = False

    def spool(self, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> Spool:
        """Returns an empty spool; see `RowStorage.spool`."""
        return _MemorySpool(np.dtype(dtype), shape)

    def close(self) -> None:
        """Does nothing: the arrays free their memory themselves."""


class OnDisk:
    """Keeps rows in an unlinked file, which the kernel frees when the process ends."""

    on_disk = True

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Creates the file in `directory`; a `ClusterError` says that it is not writable."""
        self._directory = os.fspath(directory)
        self._spools: list[_FileSpool] = []
        self._file = _open(self._directory)
        self._end = 0

    @property
    def written(self) -> int:
        """Bytes of all rows."""
        return sum(spool.nbytes for spool in self._spools)

    def spool(self, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> _FileSpool:
        """Returns an empty spool; see `RowStorage.spool`."""
        spool = _FileSpool(self, np.dtype(dtype), shape)
        self._spools.append(spool)
        return spool

    def extent(self, size: int) -> int:
        """Reserves `size` bytes of the file for a spool and returns their start; uses no disk space until written."""
        start, self._end = self._end, self._end + size
        return start

    def write(self, values: memoryview, place: int, room: int) -> int:
        """Writes at most `room` bytes at file position `place`; returns the number of bytes written, up to 1 GiB."""
        try:
            return os.pwrite(self._file.fileno(), values[: min(room, _MOST_AT_ONCE)], place)
        except OSError as error:
            raise self.unwritable(error, len(values)) from error

    def read(self, into: memoryview, place: int) -> int:
        """Reads bytes at file position `place`; returns the number of bytes read, up to 1 GiB."""
        try:
            done = os.preadv(self._file.fileno(), [into[:_MOST_AT_ONCE]], place)
            if not done:
                raise OSError(errno.EIO, f"the last {len(into)} bytes of some rows are missing")
        except OSError as error:
            raise self.unreadable(error) from error
        return done

    def unwritable(self, error: OSError, size: int) -> ClusterError:
        """Returns the error for `size` bytes that could not be written."""
        hint = (
            "free space there, or start the session with spark.local.dir (on YARN yarn.nodemanager.local-dirs) on a "
            "larger disk; with more workers each has fewer rows"
        )
        if error.errno not in _FULL:
            return ClusterError(f"cannot write to {self._directory!r}: {error.strerror}", hint=hint)
        free = shutil.disk_usage(self._directory).free if os.path.isdir(self._directory) else 0
        return ClusterError(
            f"the rows of this worker do not fit into {self._directory!r}: {self.written / 1e6:.1f} MB are there, "
            f"{size / 1e6:.1f} MB come next, and {free / 1e6:.1f} MB are free",
            hint=hint,
        )

    def unreadable(self, error: OSError) -> ClusterError:
        """Returns the error for rows that could not be read back."""
        return ClusterError(
            f"cannot read the rows of this worker back from {self._directory!r}: {error.strerror}",
            hint="the disk is failing, or something has cut the file off: look at the host's kernel log",
        )

    def close(self) -> None:
        """Closes the file, which frees it."""
        self._file.close()


class WithinBudget:
    """Keeps rows in memory up to a budget; once they exceed it, all of them spill to disk."""

    def __init__(self, budget: int, directory: str | os.PathLike[str]) -> None:
        """Sets the budget, in bytes, and the directory to spill to."""
        self._budget, self._directory = budget, directory
        self._disk: OnDisk | None = None
        self._spools: list[_MovingSpool] = []
        self._held = 0

    @property
    def on_disk(self) -> bool:
        """Whether the budget has been exceeded."""
        return self._disk is not None

    def spool(self, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> Spool:
        """Returns an empty spool; see `RowStorage.spool`."""
        spool = _MovingSpool(self, np.dtype(dtype), shape)
        if self._disk is not None:
            spool.move(self._disk)
        self._spools.append(spool)
        return spool

    def appended(self, size: int) -> None:
        """Counts `size` appended bytes; spills all rows to disk once they exceed the budget."""
        self._held += size
        if self._disk is None and self._held > self._budget:
            self._disk = OnDisk(self._directory)
            for spool in self._spools:
                spool.move(self._disk)

    def close(self) -> None:
        """Closes the file, if rows have spilled."""
        if self._disk is not None:
            self._disk.close()


class _MemorySpool:
    """Copies rows into anonymous memory that grows by remapping pages, or by a copy where the system cannot remap.

    With remapping, memory never holds all rows twice.
    """

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape
        self._size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._memory = _mapped(mmap.PAGESIZE)
        self._rows = self.nbytes = 0

    def append(self, values: Array) -> None:
        first, self._rows = self._rows, self._rows + len(values)
        needed = self._rows * self._size
        if needed > len(self._memory):
            size = needed + max(_LEAST_GROWTH, needed // 8)
            if size >= _HUGE:  # a partly used huge page would be moved as small pages
                size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
            self._memory = _resized(self._memory, size)
        self._values()[first:] = values
        self.nbytes += values.nbytes

    def finish(self) -> Array:
        self._memory = _resized(self._memory, max(1, self._rows * self._size))
        found = self._values()
        del self._memory  # freed with the array, which may only live until it is copied to a GPU
        return found

    def read(self, runs: Runs) -> Array:
        rows = self._values()
        pieces = [rows[start:stop] for start, stop in zip(runs.starts, runs.stops, strict=True)]
        return np.concatenate([rows[:0], *pieces])

    def _values(self) -> Array:
        return np.ndarray((self._rows, *self._shape), self._dtype, self._memory)


class _FileSpool:
    """Rows in extents of a file, each twice as large as the one before."""

    def __init__(self, disk: OnDisk, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._disk, self._dtype, self._shape = disk, dtype, shape
        self._row = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._extents: list[int] = []
        self.nbytes = 0

    def append(self, values: Array) -> None:
        left = _bytes(np.ascontiguousarray(values, self._dtype))
        while len(left):
            place, room = self._place(self.nbytes)
            written = self._disk.write(left, place, room)
            self.nbytes += written
            left = left[written:]

    def finish(self) -> Array:
        rows = self.nbytes // self._row if self._row else 0
        return self.read(Runs(np.array([0], np.int64), np.array([rows], np.int64)))

    def read(self, runs: Runs) -> Array:
        found = np.empty((runs.count, *self._shape), self._dtype)
        left = _bytes(found)
        for start, stop in zip((runs.starts * self._row).tolist(), (runs.stops * self._row).tolist(), strict=True):
            at = start
            while at < stop:
                place, room = self._place(at)
                done = self._disk.read(left[: min(room, stop - at)], place)
                at, left = at + done, left[done:]
        return found

    def _place(self, at: int) -> tuple[int, int]:
        """Returns the file position of byte `at` of the rows, and the number of bytes from it to the extent's end."""
        number = (at // _FIRST_EXTENT + 1).bit_length() - 1
        first, size = _FIRST_EXTENT * ((1 << number) - 1), _FIRST_EXTENT << number
        if number == len(self._extents):
            self._extents.append(self._disk.extent(size))
        return self._extents[number] + at - first, size - (at - first)


class _MovingSpool:
    """A spool in memory that can spill to disk."""

    def __init__(self, owner: WithinBudget, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._owner, self._dtype, self._shape = owner, dtype, shape
        self._spool: _MemorySpool | _FileSpool = _MemorySpool(dtype, shape)

    @property
    def nbytes(self) -> int:
        return self._spool.nbytes

    def append(self, values: Array) -> None:
        before = self.nbytes
        self._spool.append(values)
        self._owner.appended(self.nbytes - before)

    def finish(self) -> Array:
        return self._spool.finish()

    def read(self, runs: Runs) -> Array:
        return self._spool.read(runs)

    def move(self, disk: OnDisk) -> None:
        assert isinstance(self._spool, _MemorySpool)
        rows, self._spool = self._spool.finish(), disk.spool(self._dtype, self._shape)
        self._spool.append(rows)


def local_directory(local_rank: int = 0) -> str:
    """Returns the directory for a rank's files: one of the executor's local directories.

    `local_rank` spreads the ranks of a host over several disks. Spark passes the directories to Python workers in
    `SPARK_LOCAL_DIRS`: those of `spark.local.dir`, or on YARN and Kubernetes those that the cluster sets instead.
    Outside of Spark, it is the system's temporary directory. A `ClusterError` says that none is writable.
    """
    given = [path for path in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if path]
    usable = [path for path in given if os.path.isdir(path) and os.access(path, os.W_OK)]
    if given and not usable:
        raise ClusterError(
            f"no local directory of Spark's can be written to: {', '.join(given)}",
            hint="start the session with spark.local.dir at a directory that executors may write to",
        )
    return _nth(usable, local_rank) or tempfile.gettempdir()


def _nth(paths: Sequence[str], index: int) -> str:
    return paths[index % len(paths)] if paths else ""


def _mapped(size: int) -> mmap.mmap:
    """Returns `size` bytes of anonymous memory, in huge pages if it is large and the system supports them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(memory)
    return memory


def _resized(memory: mmap.mmap, size: int) -> mmap.mmap:
    """Returns the memory resized to `size` bytes, its content kept up to there; no array may still refer to it."""
    try:
        memory.resize(size)
    except SystemError:  # only Linux can remap pages
        moved = _mapped(size)
        kept = min(size, len(memory))
        moved[:kept] = memory[:kept]
        return moved
    _advise(memory)
    return memory


def _advise(memory: mmap.mmap) -> None:
    if len(memory) >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)


def _open(directory: str) -> BinaryIO:
    try:
        return tempfile.TemporaryFile(dir=directory, buffering=0, prefix="sparktorch-")
    except OSError as error:
        raise ClusterError(
            f"cannot write to {directory!r}: {error.strerror}",
            hint="start the session with spark.local.dir at a directory that executors may write to",
        ) from error


def _bytes(values: Array) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
