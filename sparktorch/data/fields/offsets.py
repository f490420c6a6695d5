"""Rows of unequal length, kept one after the other, with where each of them begins."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.base.devices import upload
from sparktorch.data.runs import Runs
from sparktorch.data.storage import RowStorage

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Elements", "Offsets"]

Int64 = npt.NDArray[np.int64]


class Offsets:
    """Where rows that lie one after the other begin and end."""

    def __init__(self, storage: RowStorage) -> None:
        """Begins without rows."""
        self._spool = storage.spool(np.int64)
        self._spool.append(np.zeros(1, np.int64))
        self._end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return self._spool.nbytes - 8

    def append(self, lengths: Int64) -> None:
        """Adds rows of those lengths."""
        if len(lengths):
            ends = self._end + np.cumsum(lengths, dtype=np.int64)
            self._spool.append(ends)
            self._end = int(ends[-1])

    def finish(self) -> Int64:
        """Returns where each row begins and the last one ends, of shape `(rows + 1,)`."""
        return self._spool.finish()

    def read(self, runs: Runs) -> tuple[Int64, Runs]:
        """Returns the same of some rows, as they will lie when only they are read, and where they lie now."""
        borders = self._spool.read(Runs(runs.starts, runs.stops + 1))
        first = np.cumsum(runs.lengths + 1) - (runs.lengths + 1)  # where the borders of each run begin
        last = first + runs.lengths
        lengths = np.delete(np.diff(borders, append=0), last)
        return np.concatenate([[0], np.cumsum(lengths)]), Runs(borders[first], borders[last])


class Elements:
    """The elements of all rows of a column.

    Attributes:
        values: All of them, of shape `(elements, *shape)`, once finished or read; on the device of the rows.
        starts: The first element of each row, int64 of shape `(rows,)`, on the CPU.
        lengths: Number of elements of each row, int64 of shape `(rows,)`, on the CPU: how large tensors become is
            decided there, without waiting for a device.
    """

    values: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor

    def __init__(self, dtype: npt.DTypeLike, storage: RowStorage, shape: tuple[int, ...] = ()) -> None:
        """Begins without rows.

        Args:
            dtype: Of an element.
            storage: Where the rows are kept.
            shape: Of an element.
        """
        self._values = storage.spool(dtype, shape)
        self._offsets = Offsets(storage)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return self._values.nbytes + self._offsets.nbytes

    def append(self, values: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        """Adds rows.

        Args:
            values: Their elements, of shape `(elements, *shape)`.
            lengths: Number of elements of each row.
        """
        self._values.append(values)
        self._offsets.append(lengths)

    def finish(self) -> None:
        """Ends appending."""
        self.values = torch.from_numpy(self._values.finish())
        self._place(self._offsets.finish())

    def to(self, device: torch.device) -> None:
        """Moves the elements, once finished."""
        self.values = self.values.to(device)

    def read(self, runs: Runs) -> Self:
        """Returns those rows, copied into memory; in place of `finish`, any number of times."""
        found = copy.copy(self)
        borders, held = self._offsets.read(runs)
        found.values = torch.from_numpy(self._values.read(held))
        found._place(borders)
        return found

    def _place(self, borders: Int64) -> None:
        self.starts = torch.from_numpy(borders[:-1])
        self.lengths = torch.from_numpy(np.diff(borders))

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the elements of the rows with those numbers.

        Args:
            index: Row numbers of shape `(rows,)`, on the CPU.

        Returns:
            The elements, of shape `(elements, *shape)`; int64 of shape `(elements,)`, the place in `index` of
            the row that each belongs to, and its own place in the row; int64 of shape `(rows,)`, how many each
            row has. All of them on the device of the rows.
        """
        where, row, place, lengths = self.locate(index)
        return self.values[where], row, place, lengths

    def locate(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what `take` does, but for the elements their numbers, int64 of shape `(elements,)`."""
        device, held = self.values.device, torch.stack([self.starts[index], self.lengths[index]])
        count = int(held[1].sum())
        starts, lengths = upload(held, device)
        row = torch.repeat_interleave(torch.arange(len(index), device=device), lengths, output_size=count)
        place = torch.arange(count, device=device) - (lengths.cumsum(0) - lengths)[row]
        return starts[row] + place, row, place, lengths
