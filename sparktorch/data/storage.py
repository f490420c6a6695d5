"""Row storage of a shard: arrays that are appended to in pieces, and read as a whole or in runs.

Rows on disk are read with `preadv`, and not mapped into memory, for two reasons: pages of files do not count as memory
of the process, and a failing disk raises an exception instead of a signal. All spools share one file, because the
number of open files is limited. The file is unlinked: no other process can truncate it, and the kernel frees it when
the process ends.
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
_SMALL_GAP = 1 << 15  # Reading a gap of this size between two runs takes no longer than asking for the second run.
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Runs:
    """Row numbers as runs of consecutive rows, which are read at once.

    Attributes:
        starts: The first row of each run, int64 of shape `(runs,)`.
        stops: The row after the last row of each run, int64 of shape `(runs,)`.
    """

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: npt.NDArray[np.integer[Any]]) -> Runs:
        """Returns the runs of row numbers of shape `(rows,)`, in their order."""
        numbers = rows.astype(np.int64, copy=False)
        if not len(numbers):
            return cls(numbers, numbers)
        cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
        starts = numbers[np.concatenate([[0], cuts])]
        return cls(starts, starts + np.diff(np.concatenate([[0], cuts, [len(numbers)]])))

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
        """Sets the directory of the file and the budget in bytes; with a budget of 0, rows are on disk from the start.

        A `ClusterError` says that the directory is not writable.
        """
        self._directory = os.fspath(directory)
        self._budget = budget
        self._spools: list[Spool] = []
        self._held = 0
        self._disk = None if budget else _Disk(self._directory)

    @property
    def on_disk(self) -> bool:
        """Whether the appended rows are on disk."""
        return self._disk is not None

    def spool(self, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> Spool:
        """Returns an empty spool for rows of the shape `shape`, whose elements have the dtype `dtype`."""
        spool = Spool(self, np.dtype(dtype), shape)
        if self._disk is not None:
            spool.move(self._disk)
        self._spools.append(spool)
        return spool

    def count_appended(self, size: int) -> None:
        """Counts `size` appended bytes; moves all rows to disk once they exceed the budget."""
        self._held += size
        if self._disk is None and self._held > self._budget:
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
        self._owner = owner
        self._dtype = dtype
        self._shape = shape
        self._rows: _MemoryRows | _FileRows = _MemoryRows(dtype, shape)

    @property
    def nbytes(self) -> int:
        """Bytes appended so far."""
        return self._rows.nbytes

    def append(self, values: Array) -> None:
        """Appends an array of shape `(rows, *shape)`, which may be read-only; copies it."""
        before = self.nbytes
        self._rows.append(values)
        self._owner.count_appended(self.nbytes - before)

    def finish(self) -> Array:
        """Returns all rows as one writable array of shape `(rows, *shape)`; can be called once."""
        return self._rows.finish()

    def read(self, runs: Runs) -> Array:
        """Returns a copy of the rows in `runs`, in their order; can be called repeatedly, but not after `finish`."""
        return self._rows.read(runs)

    def prefetch(self, runs: Runs) -> None:
        """Has the system read the rows in `runs` from disk, without waiting for them; does nothing in memory."""
        if isinstance(self._rows, _FileRows) and len(runs.starts):
            self._rows.prefetch(runs)

    def move(self, disk: _Disk) -> None:
        """Moves the rows from memory to disk."""
        rows = self._rows.finish()
        self._rows = _FileRows(disk, self._dtype, self._shape)
        self._rows.append(rows)


class _Disk:
    """An unlinked file, and where its next extent begins."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.written = 0
        self._end = 0
        try:
            self.file = tempfile.TemporaryFile(dir=directory, buffering=0, prefix="sparktorch-")  # noqa: SIM115 - it stays open
        except OSError as error:
            raise self._unwritable(error, 0) from error

    def extent(self, size: int) -> int:
        """Reserves `size` bytes of the file, which take no disk space until they are written; returns their start."""
        start = self._end
        self._end += size
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

    def prefetch(self, position: int, size: int) -> None:
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

    With remapping, memory never holds all rows twice. Rows that are appended all at once, as for scoring, are in an
    array of NumPy's, which reuses the memory of earlier rows: new pages would cost more than the copy.
    """

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._shape = shape
        self._row_size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        # The rows of the first `append`, until the second moves them to `_memory`.
        self._first_rows: Array | None = np.empty((0, *shape), dtype)
        self._count = 0
        self.nbytes = 0

    def append(self, values: Array) -> None:
        before = self._count
        self._count += len(values)
        self.nbytes += values.nbytes
        if not before:
            self._first_rows = np.array(values, self._dtype, order="C")
            return
        if self._first_rows is not None:
            self._memory = _map_memory(mmap.PAGESIZE)
        needed = self._count * self._row_size
        if needed > len(self._memory):
            size = needed + max(_LEAST_GROWTH, needed // 8)
            if size >= _HUGE:  # The system would move a partly used huge page as small pages.
                size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
            self._memory = _resize(self._memory, size)
        rows = self._rows_in_memory()
        if self._first_rows is not None:
            rows[:before] = self._first_rows
            self._first_rows = None
        rows[before:] = values

    def finish(self) -> Array:
        if self._first_rows is not None:
            rows = self._first_rows
            self._first_rows = None
            return rows
        self._memory = _resize(self._memory, max(1, self._count * self._row_size))
        rows = self._rows_in_memory()
        # The array alone holds the memory from now on: it may live only until it is copied to a GPU.
        del self._memory
        return rows

    def read(self, runs: Runs) -> Array:
        rows = self._rows_in_memory() if self._first_rows is None else self._first_rows
        pieces = [rows[start:stop] for start, stop in zip(runs.starts, runs.stops, strict=True)]
        return np.concatenate([rows[:0], *pieces])

    def _rows_in_memory(self) -> Array:
        return np.ndarray((self._count, *self._shape), self._dtype, self._memory)


class _FileRows:
    """Rows in extents of a file, each twice as large as the extent before.

    So extent `n` begins with byte `_FIRST_EXTENT * (2**n - 1)` of the rows, wherever it is in the file.
    """

    def __init__(self, disk: _Disk, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._disk = disk
        self._dtype = dtype
        self._shape = shape
        self._row_size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._extents: list[int] = []  # Where each extent begins in the file.
        self.nbytes = 0

    def append(self, values: Array) -> None:
        left = _bytes(np.ascontiguousarray(values, self._dtype))
        while len(left):
            position, room = self._locate(self.nbytes)
            written = self._disk.write(left, position, room)
            self.nbytes += written
            left = left[written:]

    def finish(self) -> Array:
        rows = self.nbytes // self._row_size if self._row_size else 0
        return self.read(Runs(np.array([0], np.int64), np.array([rows], np.int64)))

    def prefetch(self, runs: Runs) -> None:
        # Runs with small gaps between them are asked for together.
        gaps = runs.starts[1:] - runs.stops[:-1]
        cuts = np.flatnonzero((gaps < 0) | (gaps * self._row_size > _SMALL_GAP)) + 1
        first_runs = np.append(0, cuts)
        last_runs = np.append(cuts, len(runs.starts)) - 1
        for position, size in self._pieces(Runs(runs.starts[first_runs], runs.stops[last_runs])):
            self._disk.prefetch(position, size)

    def read(self, runs: Runs) -> Array:
        rows = np.empty((runs.count, *self._shape), self._dtype)
        into = _bytes(rows)
        done = 0
        for position, size in self._pieces(runs):
            end = done + size
            while done < end:
                count = self._disk.read(into[done:end], position)
                done += count
                position += count
        return rows

    def _pieces(self, runs: Runs) -> Iterator[tuple[int, int]]:
        """Returns the file position and the number of bytes of each run; a run beyond the end of an extent is cut."""
        starts = runs.starts * self._row_size
        stops = runs.stops * self._row_size
        has_bytes = stops > starts
        starts = starts[has_bytes]
        stops = stops[has_bytes]
        # Each round cuts the runs that go on beyond their first extent, until none does.
        while True:
            # This is `_locate` for arrays: the exponent of a float is the number of bits of a whole number.
            number = np.frexp((starts // _FIRST_EXTENT + 1).astype(np.float64))[1].astype(np.int64) - 1
            ends = _FIRST_EXTENT * ((2 << number) - 1)
            beyond = np.flatnonzero(stops > ends)
            if not len(beyond):
                break
            starts = np.insert(starts, beyond + 1, ends[beyond])
            stops = np.insert(stops, beyond, ends[beyond])
        offsets = np.array(self._extents, np.int64)[number] - _FIRST_EXTENT * ((1 << number) - 1)
        return zip((starts + offsets).tolist(), (stops - starts).tolist(), strict=True)

    def _locate(self, byte: int) -> tuple[int, int]:
        """Returns where a byte of the rows is in the file, and the number of bytes from it to the extent's end."""
        number = (byte // _FIRST_EXTENT + 1).bit_length() - 1
        size = _FIRST_EXTENT << number
        if number == len(self._extents):
            self._extents.append(self._disk.extent(size))
        byte_in_extent = byte - _FIRST_EXTENT * ((1 << number) - 1)
        return self._extents[number] + byte_in_extent, size - byte_in_extent


def local_directory(local_rank: int = 0) -> str:
    """Returns the directory for a rank's files: one of the executor's local directories.

    `local_rank` spreads the ranks of a host over several disks. Spark passes the directories to Python workers in
    `SPARK_LOCAL_DIRS`: the directories of `spark.local.dir`, in whose place YARN and Kubernetes set others. Outside of
    Spark, it is the system's temporary directory.
    """
    directories = [path for path in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if path]
    usable = [path for path in directories if os.path.isdir(path) and os.access(path, os.W_OK)] or directories
    return usable[local_rank % len(usable)] if usable else tempfile.gettempdir()


def _map_memory(size: int) -> mmap.mmap:
    """Returns `size` bytes of anonymous memory, in huge pages if it is large and the system supports them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(memory)
    return memory


def _resize(memory: mmap.mmap, size: int) -> mmap.mmap:
    """Returns memory of `size` bytes with the content of `memory`, to which no array may still refer."""
    try:
        memory.resize(size)
    except SystemError:  # Only Linux can remap pages.
        copy = _map_memory(size)
        count = min(size, len(memory))
        copy[:count] = memory[:count]
        return copy
    _advise(memory)
    return memory


def _advise(memory: mmap.mmap) -> None:
    """Asks the system for huge pages, if the memory is large."""
    if len(memory) >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # The kernel may have no huge pages.
            memory.madvise(mmap.MADV_HUGEPAGE)


def _bytes(values: Array) -> memoryview:
    """Returns a view of the bytes of an array."""
    return values.reshape(-1).view(np.uint8).data
