"""Row storage of a shard: arrays that are appended to in pieces, and read as a whole or in runs.

Rows on disk are read with `preadv`, not mapped: file pages do not count as process memory, and a failing
disk raises an exception instead of a signal. All spools share one file, because open files are limited.
The file is unlinked: no other process can truncate it, and the kernel frees it when the process ends.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparktorch.errors import ClusterError

__all__ = ["RowStorage", "Runs", "Spool", "local_directory"]

Array = npt.NDArray[Any]

# All sizes are in bytes.
_LEAST_GROWTH = 1 << 20
_HUGE_PAGE = 2 << 20  # Most machines have huge pages of this size.
_HUGE = 2 * _HUGE_PAGE  # From this size on, huge pages are worth it.
_FIRST_EXTENT = 1 << 20
_MOST_AT_ONCE = 1 << 30  # macOS refuses to read or write 2 GiB at once.
_SMALL_GAP = 1 << 15  # To read such a gap between runs takes no longer than to ask for the next run.
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Runs:
    """Row numbers as runs of rows that are read at once: int64 `starts` and, one past the last row of each, `stops`."""

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: npt.NDArray[np.integer[Any]]) -> Runs:
        """Returns the runs of row numbers of shape `(rows,)`, in their order."""
        rows = rows.astype(np.int64, copy=False)
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        # The first run begins with the first row, if there is one.
        starts = rows[np.concatenate([np.zeros(min(1, len(rows)), np.int64), cuts])]
        return cls(starts, starts + np.diff(np.concatenate([[0], cuts, [len(rows)]]))[: len(starts)])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of rows in each run."""
        return self.stops - self.starts

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.lengths.sum())


class RowStorage:
    """Keeps rows in memory up to a budget; once they exceed it, all of them go to disk.

    On disk they are in an unlinked file, which the kernel frees when the process ends.
    """

    def __init__(self, directory: str | os.PathLike[str] = "", *, budget: float = math.inf) -> None:
        """Sets the directory of the file and the budget, in bytes; without one, rows are on disk from the start.

        A `ClusterError` says that the directory is not writable.
        """
        self._directory, self._budget = os.fspath(directory), budget
        self._spools: list[Spool] = []
        self._bytes = 0
        self._disk = None if budget else _Disk(self._directory)

    @property
    def on_disk(self) -> bool:
        """Whether the appended rows are on disk."""
        return self._disk is not None

    def spool(self, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> Spool:
        """Returns an empty spool of elements of `dtype`, and of rows of `shape`."""
        spool = Spool(self, np.dtype(dtype), shape)
        if self._disk is not None:
            spool.move(self._disk)
        self._spools.append(spool)
        return spool

    def appended(self, size: int) -> None:
        """Counts `size` appended bytes; moves all rows to disk once they exceed the budget."""
        self._bytes += size
        if self._disk is None and self._bytes > self._budget:
            self._disk = _Disk(self._directory)
            for spool in self._spools:
                spool.move(self._disk)

    def close(self) -> None:
        """Frees the rows on disk."""
        if self._disk is not None:
            self._disk.file.close()


class Spool:
    """Append-only storage for rows of one dtype and shape, in memory or on disk."""

    def __init__(self, owner: RowStorage, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._owner, self._dtype, self._shape = owner, dtype, shape
        self._rows: _MemoryRows | _FileRows = _MemoryRows(dtype, shape)

    @property
    def nbytes(self) -> int:
        """Bytes appended so far."""
        return self._rows.nbytes

    def append(self, values: Array) -> None:
        """Appends an array of shape `(rows, *shape)`, which may be read-only; copies it."""
        before = self.nbytes
        self._rows.append(values)
        self._owner.appended(self.nbytes - before)

    def finish(self) -> Array:
        """Returns all rows as one writable array of shape `(rows, *shape)`; can be called once."""
        return self._rows.finish()

    def read(self, runs: Runs) -> Array:
        """Returns a copy of the rows in `runs`, in their order; can be called repeatedly, but not after `finish`."""
        return self._rows.read(runs)

    def expect(self, runs: Runs) -> None:
        """Has the system read the rows in `runs` from disk, if they are there, without waiting for them."""
        if isinstance(self._rows, _FileRows) and len(runs.starts):
            self._rows.expect(runs)

    def move(self, disk: _Disk) -> None:
        """Moves the rows from memory to disk."""
        rows, self._rows = self._rows.finish(), _FileRows(disk, self._dtype, self._shape)
        self._rows.append(rows)


class _Disk:
    """An unlinked file, and where its next extent begins."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.written = self._end = 0
        try:
            self.file = tempfile.TemporaryFile(dir=directory, buffering=0, prefix="sparktorch-")  # noqa: SIM115 - it stays open
        except OSError as error:
            raise self._unwritable(error, 0) from error

    def extent(self, size: int) -> int:
        """Reserves `size` bytes of the file and returns their start; uses no disk space until written."""
        start, self._end = self._end, self._end + size
        return start

    def write(self, values: memoryview, position: int, room: int) -> int:
        """Writes at most `room` bytes at a file position; returns the number of bytes written, up to 1 GiB."""
        try:
            count = os.pwrite(self.file.fileno(), values[: min(room, _MOST_AT_ONCE)], position)
        except OSError as error:
            raise self._unwritable(error, len(values)) from error
        self.written += count
        return count

    def read(self, into: memoryview, position: int) -> int:
        """Reads bytes at a file position; returns the number of bytes read, up to 1 GiB."""
        try:
            count = os.preadv(self.file.fileno(), [into[:_MOST_AT_ONCE]], position)
            if not count:
                raise OSError(errno.EIO, f"the last {len(into)} bytes of some rows are missing")
        except OSError as error:
            raise ClusterError(
                f"cannot read the rows of this worker back from {self._directory!r}: {error.strerror}",
                hint="the disk is failing, or something has cut the file off: look at the host's kernel log",
                code="ST-LOCAL-DISK",
            ) from error
        return count

    def expect(self, position: int, size: int) -> None:
        """Has the system read `size` bytes at a file position into its cache."""
        if hasattr(os, "posix_fadvise"):  # macOS has no such call.
            with suppress(OSError):  # `read` will raise.
                os.posix_fadvise(self.file.fileno(), position, size, os.POSIX_FADV_WILLNEED)

    def _unwritable(self, error: OSError, size: int) -> ClusterError:
        """Returns the error for `size` bytes that could not be written."""
        what = f"cannot write to {self._directory!r}: {error.strerror}"
        hint = "start the session with spark.local.dir (on YARN yarn.nodemanager.local-dirs) "
        if error.errno in _FULL:
            free = shutil.disk_usage(self._directory).free if os.path.isdir(self._directory) else 0
            what = f"the rows of this worker do not fit into {self._directory!r}: {self.written / 1e6:.1f} MB are "
            what += f"there, {size / 1e6:.1f} MB come next, and {free / 1e6:.1f} MB are free"
            hint = f"free space there, or {hint}on a larger disk; with more workers each has fewer rows"
        else:
            hint += "at a directory that executors may write to"
        return ClusterError(what, hint=hint, code="ST-LOCAL-DISK")


class _MemoryRows:
    """Copies rows into anonymous memory that grows by remapping pages, or by a copy where the system cannot remap.

    With remapping, memory never holds all rows twice. Rows that are appended at once, as those that are scored, are in
    an array of NumPy's, which takes memory that the rows before have left: new pages cost more than the copy.
    """

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape
        self._size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._first: Array | None = np.empty((0, *shape), dtype)
        self._rows = self.nbytes = 0

    def append(self, values: Array) -> None:
        before, self._rows = self._rows, self._rows + len(values)
        self.nbytes += values.nbytes
        if not before:
            self._first = np.array(values, self._dtype, order="C")
            return
        if self._first is not None:
            self._memory = _mapped(mmap.PAGESIZE)
        needed = self._rows * self._size
        if needed > len(self._memory):
            size = needed + max(_LEAST_GROWTH, needed // 8)
            if size >= _HUGE:  # The system would move a partly used huge page as small pages.
                size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
            self._memory = _resized(self._memory, size)
        rows = self._values()
        if self._first is not None:
            rows[:before], self._first = self._first, None
        rows[before:] = values

    def finish(self) -> Array:
        if self._first is not None:
            rows, self._first = self._first, None
            return rows
        self._memory = _resized(self._memory, max(1, self._rows * self._size))
        rows = self._values()
        # The array alone holds the memory from now on: it may live only until it is copied to a GPU.
        del self._memory
        return rows

    def read(self, runs: Runs) -> Array:
        rows = self._values() if self._first is None else self._first
        pieces = [rows[start:stop] for start, stop in zip(runs.starts, runs.stops, strict=True)]
        return np.concatenate([rows[:0], *pieces])

    def _values(self) -> Array:
        return np.ndarray((self._rows, *self._shape), self._dtype, self._memory)


class _FileRows:
    """Rows in extents of a file, each twice as large as the one before.

    So extent `n` begins with byte `_FIRST_EXTENT * (2**n - 1)` of the rows, wherever it is in the file.
    """

    def __init__(self, disk: _Disk, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._disk, self._dtype, self._shape = disk, dtype, shape
        self._row = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._extents: list[int] = []
        self.nbytes = 0

    def append(self, values: Array) -> None:
        remaining = _bytes(np.ascontiguousarray(values, self._dtype))
        while len(remaining):
            position, room = self._locate(self.nbytes)
            written = self._disk.write(remaining, position, room)
            self.nbytes += written
            remaining = remaining[written:]

    def finish(self) -> Array:
        rows = self.nbytes // self._row if self._row else 0
        return self.read(Runs(np.array([0], np.int64), np.array([rows], np.int64)))

    def expect(self, runs: Runs) -> None:
        gaps = runs.starts[1:] - runs.stops[:-1]
        cuts = np.flatnonzero((gaps < 0) | (gaps * self._row > _SMALL_GAP)) + 1
        first, last = np.append(0, cuts), np.append(cuts, len(runs.starts)) - 1
        for position, size in self._pieces(Runs(runs.starts[first], runs.stops[last])):
            self._disk.expect(position, size)

    def read(self, runs: Runs) -> Array:
        rows = np.empty((runs.count, *self._shape), self._dtype)
        into, start = _bytes(rows), 0
        for position, size in self._pieces(runs):
            end = start + size
            while start < end:
                count = self._disk.read(into[start:end], position)
                start, position = start + count, position + count
        return rows

    def _pieces(self, runs: Runs) -> Iterator[tuple[int, int]]:
        """Returns the file position and the number of bytes of each run; a run beyond the end of an extent is cut."""
        starts, stops = runs.starts * self._row, runs.stops * self._row
        starts, stops = starts[stops > starts], stops[stops > starts]
        while True:
            # The exponent of a float is the number of bits, by which `_locate` finds the extent of one byte.
            number = np.frexp((starts // _FIRST_EXTENT + 1).astype(np.float64))[1].astype(np.int64) - 1
            ends = _FIRST_EXTENT * ((2 << number) - 1)
            beyond = np.flatnonzero(stops > ends)
            if not len(beyond):
                break
            starts, stops = np.insert(starts, beyond + 1, ends[beyond]), np.insert(stops, beyond, ends[beyond])
        first = np.array(self._extents, np.int64)[number] - _FIRST_EXTENT * ((1 << number) - 1)
        return zip((starts + first).tolist(), (stops - starts).tolist(), strict=True)

    def _locate(self, at: int) -> tuple[int, int]:
        """Returns the file position of byte `at` of the rows, and the number of bytes from it to the extent's end."""
        number = (at // _FIRST_EXTENT + 1).bit_length() - 1
        first, size = _FIRST_EXTENT * ((1 << number) - 1), _FIRST_EXTENT << number
        if number == len(self._extents):
            self._extents.append(self._disk.extent(size))
        return self._extents[number] + at - first, size - (at - first)


def local_directory(local_rank: int = 0) -> str:
    """Returns the directory for a rank's files: one of the executor's local directories.

    `local_rank` spreads the ranks of a host over several disks. Spark passes the directories to Python workers in
    `SPARK_LOCAL_DIRS`: those of `spark.local.dir`, or on YARN and Kubernetes those that the cluster sets instead.
    Outside of Spark, it is the system's temporary directory.
    """
    directories = [path for path in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if path]
    usable = [path for path in directories if os.path.isdir(path) and os.access(path, os.W_OK)] or directories
    return usable[local_rank % len(usable)] if usable else tempfile.gettempdir()


def _mapped(size: int) -> mmap.mmap:
    """Returns `size` bytes of anonymous memory, in huge pages if it is large and the system supports them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(memory)
    return memory


def _resized(memory: mmap.mmap, size: int) -> mmap.mmap:
    """Returns the memory resized to `size` bytes, its content kept up to there; no array may still refer to it."""
    try:
        memory.resize(size)
    except SystemError:  # Only Linux can remap pages.
        moved = _mapped(size)
        copied = min(size, len(memory))
        moved[:copied] = memory[:copied]
        return moved
    _advise(memory)
    return memory


def _advise(memory: mmap.mmap) -> None:
    if len(memory) >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # The kernel may have no huge pages.
            memory.madvise(mmap.MADV_HUGEPAGE)


def _bytes(values: Array) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
