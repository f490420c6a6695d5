"""Lists of the best candidates of each row, by products of vectors, in an Arrow function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from pyspark import TaskContext
from pyspark.sql import DataFrame

from sparktorch.data.convert.tensors import to_arrow
from sparktorch.spark.column_names import quoted_name
from sparktorch.spark.shipping import Sent, send
from sparktorch.tasks.recommender.network import IdIndex
from sparktorch.tasks.recommender.top_k import NOTHING, block_rows, top_k

__all__ = ["Vectors", "recommended"]

_MOST_ELEMENTS = (1 << 31) - 1  # An array of lists counts its elements in 32 bits.
_loaded: dict[str, Vectors] = {}  # A process keeps the last ones alone: they may be large.


@dataclass(frozen=True, eq=False)
class Vectors:
    """Users or items with their vectors, float32 of shape `(ids, width)`."""

    structs: pa.StructArray
    values: npt.NDArray[np.float32]

    @property
    def ids(self) -> pa.Array:
        """The ids."""
        return self.structs.field(0)

    @cached_property
    def index(self) -> IdIndex:
        """The ids, for look-ups."""
        return IdIndex(self.structs)

    def table(self) -> pa.Table:
        """Returns the columns `id` and `features`, an array of floats."""
        most = max(1, _MOST_ELEMENTS // self.values.shape[1])
        lists = [to_arrow(self.values[start : start + most]) for start in range(0, len(self.values), most)]
        return pa.table({"id": self.ids, "features": pa.chunked_array(lists, pa.list_(pa.float32()))})


def recommended(rows: DataFrame, candidates: Vectors, count: int, name: str, candidate_name: str) -> DataFrame:
    """Returns the `count` best candidates of each row, as Spark's ALS does.

    Args:
        rows: The columns `id`, `features`, an array of floats, and perhaps `seen`, the ids of whom to leave out.
        candidates: Whom to choose from.
        count: Length of the lists; shorter are those of rows that have fewer candidates.
        name: Name of the column of ids.
        candidate_name: Name of the candidates' ids.
    """
    sent = send(rows.sparkSession, candidates)

    def best(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        torch.set_num_threads(max(1, context.cpus()) if context else 1)
        vectors = _vectors(sent)
        for batch in batches:
            if batch.num_rows:
                yield pa.RecordBatch.from_arrays(
                    [batch.column(0), _lists(batch, vectors, count, candidate_name)], names=[name, "recommendations"]
                )

    kinds = rows.schema
    item = f"struct<{quoted_name(candidate_name)}: {_sql(candidates.ids.type)}, rating: float>"
    schema = f"{quoted_name(name)} {kinds['id'].dataType.simpleString()}, recommendations array<{item}>"
    return rows.mapInArrow(best, schema)


def _lists(batch: pa.RecordBatch, candidates: Vectors, count: int, candidate_name: str) -> pa.Array:
    """Returns the list of structs of each row of a batch."""
    row_vectors = torch.tensor(batch.column(1).flatten().to_numpy()).view(batch.num_rows, -1)
    candidate_vectors = torch.from_numpy(candidates.values).T
    left_out = _left_out(batch.column(2), candidates) if batch.num_columns > 2 else None
    size = block_rows(len(candidates.values))
    blocks = []
    for first in range(0, len(row_vectors), size):
        scores = row_vectors[first : first + size] @ candidate_vectors
        if left_out is not None:
            rows, columns = left_out
            entries = slice(*np.searchsorted(rows, [first, first + size]))
            scores[rows[entries] - first, columns[entries]] = NOTHING
        blocks.append(top_k(scores, count))
    ratings, indices = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    is_candidate = ratings > NOTHING
    ids = candidates.ids.take(pa.array(indices[is_candidate].numpy()))
    structs = pa.StructArray.from_arrays(
        [ids, pa.array(ratings[is_candidate].numpy())], names=[candidate_name, "rating"]
    )
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), is_candidate.sum(1).cumsum(0).int()])
    return pa.ListArray.from_arrays(pa.array(ends.numpy()), structs)


def _left_out(seen: pa.Array, candidates: Vectors) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns row and column of each score to leave out, by row."""
    columns = candidates.index.indices(seen.flatten())
    rows = np.repeat(np.arange(len(seen)), seen.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
    return rows[columns >= 0], columns[columns >= 0]


def _vectors(sent: Sent) -> Vectors:
    if sent.key not in _loaded:
        _loaded.clear()
        _loaded[sent.key] = sent.load()
    return _loaded[sent.key]


def _sql(kind: pa.DataType) -> str:
    names = {pa.int8(): "tinyint", pa.int16(): "smallint", pa.int32(): "int", pa.int64(): "bigint"}
    return names.get(kind, "string")
