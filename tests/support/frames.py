"""Rows as the ranks receive them: record batches under the wire names, made without Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparktorch.data.columns import KEY, LABEL, VALIDATION, WEIGHT, Columns, TensorSpec, input_name
from sparktorch.data.convert.tensors import to_arrow
from sparktorch.data.sampling.plan import rank_of_key

WIDTH = 5

Array = npt.NDArray[Any]


def record_batches(arrays: Mapping[str, Array], *, size: int = 100) -> list[pa.RecordBatch]:
    """Cuts arrays of equal length into record batches of at most `size` rows."""
    whole = pa.RecordBatch.from_arrays([to_arrow(values) for values in arrays.values()], names=list(arrays))
    return [whole.slice(start, size) for start in range(0, whole.num_rows, size)]


def replaced(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """Returns the batch with another column of that name; `set_column` is there from pyarrow 15 on."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True)) | {name: column}
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


@dataclass(frozen=True)
class Table:
    """Rows by wire name, with the columns that describe them."""

    arrays: dict[str, Array]
    columns: Columns

    @classmethod
    def random(
        cls,
        rows: int,
        *,
        classes: int | None = None,
        weighted: bool = False,
        validated: bool = False,
        seed: int = 0,
    ) -> Table:
        """Makes rows whose label follows from the features: classes, or a number."""
        random = np.random.default_rng(seed)
        x = random.normal(size=(rows, WIDTH)).astype(np.float32)
        signal = x @ np.linspace(-1, 1, WIDTH, dtype=np.float32)
        if classes is None:
            label, dtype = np.sin(signal), "float32"
        else:
            label, dtype = np.digitize(signal, np.linspace(-1, 1, classes - 1)).astype(np.float64), "float64"
        arrays: dict[str, Array] = {input_name(0): x, LABEL: label}
        if weighted:
            arrays[WEIGHT] = random.uniform(0, 3, rows).astype(np.float32)
            arrays[WEIGHT][:: max(2, rows // 9)] = 0  # rows that count for nothing are rows all the same
        if validated:
            arrays[VALIDATION] = random.random(rows) < 0.25
        arrays[KEY] = random.integers(-(2**63), 2**63 - 1, rows, dtype=np.int64)
        columns = Columns(
            inputs=(TensorSpec(name=input_name(0), column="features", dtype="float32", shape=(WIDTH,)),),
            label=TensorSpec(name=LABEL, column="target", dtype=dtype),  # type: ignore[arg-type]
            classes=classes,
            weight=TensorSpec(name=WEIGHT, column="importance", dtype="float32") if weighted else None,
            validation="held_out" if validated else None,
        )
        return cls(arrays, columns)

    def __len__(self) -> int:
        return len(self.arrays[KEY])

    def take(self, index: Array) -> Table:
        """Returns the rows with those numbers, or of that mask."""
        return replace(self, arrays={name: values[index] for name, values in self.arrays.items()})

    def shuffled(self, seed: int) -> Table:
        """Returns the same rows in another order."""
        return self.take(np.random.default_rng(seed).permutation(len(self)))

    def by_key(self) -> Table:
        """Returns the same rows in the order of their positions: of the keys, read as unsigned."""
        return self.take(np.argsort(self.arrays[KEY].view(np.uint64)))

    def parts(self, ranks: int) -> list[Table]:
        """Returns the rows of every rank."""
        rank = rank_of_key(self.arrays[KEY], ranks)
        return [self.take(rank == r) for r in range(ranks)]

    def batches(self, *, size: int = 100) -> list[pa.RecordBatch]:
        """Returns the rows as record batches; none where there are no rows."""
        return record_batches(self.arrays, size=size)

    def with_values(self, name: str, values: Iterable[float], *, at: int = 0) -> Table:
        """Returns the same rows with some values of one column overwritten, from row `at` on."""
        changed = self.arrays[name].copy()
        new = np.fromiter(values, changed.dtype)
        changed[at : at + len(new)] = new.reshape(-1, *[1] * (changed.ndim - 1))
        return replace(self, arrays={**self.arrays, name: changed})
