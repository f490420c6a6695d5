"""Row numbers as runs of consecutive rows, each read at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Runs"]


@dataclass(frozen=True)
class Runs:
    """Row numbers, as runs of consecutive rows: int64 `starts` and, one past the last row of each, `stops`."""

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: npt.NDArray[np.integer[Any]]) -> Runs:
        """Returns the runs of row numbers of shape `(rows,)`, in their order."""
        rows = rows.astype(np.int64, copy=False)
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
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
