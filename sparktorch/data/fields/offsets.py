"""Rows of unequal length, stored as concatenated elements and offsets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.base.devices import upload
from sparktorch.data.storage import RowStorage, Runs

__all__ = ["ElementSpool", "Elements", "Offsets"]

Int64 = npt.NDArray[np.int64]


class Offsets:
    """The offsets of concatenated rows: where each row begins and the last one ends."""

    def __init__(self, storage: RowStorage) -> None:
        """Creates offsets without rows."""
        self._spool = storage.spool(np.int64)
        self._spool.append(np.zeros(1, np.int64))
        self._end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return self._spool.nbytes - 8

    def append(self, lengths: Int64) -> None:
        """Appends rows of those lengths, int64 of shape `(rows,)`."""
        if len(lengths):
            ends = self._end + np.cumsum(lengths, dtype=np.int64)
            self._spool.append(ends)
            self._end = int(ends[-1])

    def finish(self) -> Int64:
        """Returns the offsets, int64 of shape `(rows + 1,)`."""
        return self._spool.finish()

    def read(self, runs: Runs) -> tuple[Int64, Runs]:
        """Returns the offsets of the rows in `runs` among themselves, and the runs of their elements in storage."""
        borders = self._spool.read(Runs(runs.starts, runs.stops + 1))
        first = np.cumsum(runs.lengths + 1) - (runs.lengths + 1)  # index of each run's first offset
        last = first + runs.lengths
        lengths = np.delete(np.diff(borders, append=0), last)
        return np.concatenate([[0], np.cumsum(lengths)]), Runs(borders[first], borders[last])


class ElementSpool:
    """Rows of elements of one dtype and shape, appended to in pieces."""

    def __init__(self, dtype: npt.DTypeLike, storage: RowStorage, shape: tuple[int, ...] = ()) -> None:
        """Creates storage without rows, for elements of `shape`."""
        self._values = storage.spool(dtype, shape)
        self._offsets = Offsets(storage)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return self._values.nbytes + self._offsets.nbytes

    def append(self, values: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        """Appends rows, as elements of shape `(elements, *shape)` and the int64 number of elements of each row."""
        self._values.append(values)
        self._offsets.append(lengths)

    def finish(self) -> Elements:
        """Ends appending, and returns all rows."""
        return Elements.of(self._values.finish(), self._offsets.finish())

    def expect(self, runs: Runs) -> None:
        """Has the system read the elements of the rows in `runs`, without waiting for them; reads their offsets."""
        _, held = self._offsets.read(runs)
        self._values.expect(held)

    def read(self, runs: Runs) -> Elements:
        """Returns the rows in `runs`, copied into memory; can be called repeatedly, but not after `finish`."""
        borders, held = self._offsets.read(runs)
        return Elements.of(self._values.read(held), borders)


@dataclass(frozen=True)
class Elements:
    """The elements of all rows of a column.

    Attributes:
        values: Elements of all rows, `(elements, *shape)`, on the device of the rows.
        starts: First element of each row, int64 of shape `(rows,)`, on the CPU.
        lengths: Elements of each row, int64 of shape `(rows,)`; on the CPU, so that tensor sizes are known without
            synchronising with a device.
    """

    values: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, values: npt.NDArray[Any], borders: Int64) -> Elements:
        """Returns the rows of concatenated elements, from where each begins and the last one ends."""
        return cls(*map(torch.from_numpy, (values, borders[:-1], np.diff(borders))))

    def to(self, device: torch.device) -> Elements:
        """Returns the rows on a device."""
        return replace(self, values=self.values.to(device))

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the elements of the rows `index`, int64 on the CPU.

        They have the shape `(elements, *shape)`. With them come, as int64, the position of each element's row in
        `index`, its position in the row, and the number of elements of each row. All are on the device of the rows.
        """
        where, row, place, lengths = self.locate(index)
        return self.values[where], row, place, lengths

    def locate(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the same as `take`, but indices into `values`, int64 of shape `(elements,)`, instead of elements."""
        device, held = self.values.device, torch.stack([self.starts[index], self.lengths[index]])
        count = int(held[1].sum())
        starts, lengths = upload(held, device)
        row = torch.repeat_interleave(torch.arange(len(index), device=device), lengths, output_size=count)
        place = torch.arange(count, device=device) - (lengths.cumsum(0) - lengths)[row]
        return starts[row] + place, row, place, lengths
