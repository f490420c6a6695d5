"""The columns of a rank's rows, one class for each way of keeping them: Arrow in, arguments of `forward` out."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sparktorch.data.columns import TensorSpec
from sparktorch.data.spool import Runs, Spooler
from sparktorch.data.tensors import to_numpy

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Dense", "Field"]

Array = npt.NDArray[Any]


class Field(ABC):
    """One column of a rank's rows: filled batch by batch, then read by row number."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""

    @abstractmethod
    def append(self, column: pa.Array, *, first_row: int = 0) -> None:
        """Checks and keeps the rows of a batch.

        Args:
            column: The batch's column.
            first_row: Number of its first row, for messages.

        Raises:
            ColumnError: A row cannot be trained on; says column, count and first row.
        """

    @abstractmethod
    def stand_in(self) -> None:
        """Appends a row of zeros, for a rank without rows to join the others with."""

    @abstractmethod
    def finish(self, device: str) -> None:
        """Ends appending; the rows move to `device` where they are kept as tensors."""

    @abstractmethod
    def read(self, runs: Runs) -> Self:
        """Returns a finished field of those rows, copied into memory; in place of `finish`, any number of times."""

    @abstractmethod
    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns what the rows with those numbers, int64 of shape `(rows,)`, are to `forward`."""


class Dense(Field):
    """Rows of equal shape: one tensor of shape `(rows, *spec.shape)`.

    Attributes:
        values: All rows, once finished.
    """

    values: torch.Tensor

    def __init__(
        self,
        spec: TensorSpec,
        spooler: Spooler,
        check: Callable[[Array], Array],
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        """Begins without rows.

        Args:
            spec: The column.
            spooler: Where the rows are kept.
            check: Refuses rows that cannot be trained on; returns them as they are to be kept.
            dtype: What they are kept as, if not as `spec.dtype`.
        """
        self._spec, self._check = spec, check
        self._dtype = np.dtype(dtype or spec.dtype)
        self._spool = spooler.spool(spec.name, self._dtype, spec.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return self._spool.nbytes

    def append(self, column: pa.Array, *, first_row: int = 0) -> None:
        """Checks and keeps the rows of a batch; see `Field.append`."""
        self._spool.append(self._check(to_numpy(column, self._spec, first_row=first_row)))

    def stand_in(self) -> None:
        """Appends a row of zeros."""
        self._spool.append(np.zeros((1, *self._spec.shape), self._dtype))

    def finish(self, device: str) -> None:
        """Ends appending and moves the rows to `device`."""
        self.values = torch.from_numpy(self._spool.finish()).to(device)

    def read(self, runs: Runs) -> Self:
        """Returns a finished field of those rows, copied into memory."""
        found = copy.copy(self)
        found.values = torch.from_numpy(self._spool.read(runs))
        return found

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns one tensor of shape `(rows, *spec.shape)`."""
        return (self.values.index_select(0, index),)
