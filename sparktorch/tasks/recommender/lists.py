"""Lists of the best candidates for each row, by products of vectors, in an Arrow function."""

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

__all__ = ["Vectors", "best_candidates"]

_MOST_ELEMENTS = (1 << 31) - 1  # An array of lists counts its elements in 32 bits.
_loaded: dict[str, Vectors] = {}  # A Python worker keeps only the vectors that it used last: they may be large.


@dataclass(frozen=True, eq=False)
class Vectors:
    """Users or items with their vectors.

    Attributes:
        structs: The ids and their features.
        values: The vectors, float32 of shape `(ids, width)`.
    """

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
        most_rows = max(1, _MOST_ELEMENTS // self.values.shape[1])
        lists = [to_arrow(self.values[start : start + most_rows]) for start in range(0, len(self.values), most_rows)]
        return pa.table({"id": self.ids, "features": pa.chunked_array(lists, pa.list_(pa.float32()))})


def best_candidates(rows: DataFrame, candidates: Vectors, count: int, *, name: str, candidate_name: str) -> DataFrame:
    """Returns the `count` best candidates for each row, in the form that Spark's ALS returns.

    Args:
        rows: The columns `id`, `features`, an array of floats, and perhaps `seen`, the ids of candidates to leave out.
        candidates: The ids to choose from, with their vectors.
        count: The length of the lists. A row with fewer candidates has a shorter list.
        name: The name that the result has for the column of ids.
        candidate_name: The name that the structs in `recommendations` have for the candidates' ids.
    """
    sent = send(rows.sparkSession, candidates)

    def recommend(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        torch.set_num_threads(max(1, context.cpus()) if context else 1)
        vectors = _load(sent)
        for batch in batches:
            if batch.num_rows:
                lists = _lists(batch, vectors, count, candidate_name)
                yield pa.RecordBatch.from_arrays([batch.column(0), lists], names=[name, "recommendations"])

    id_type = rows.schema["id"].dataType.simpleString()
    entry = f"struct<{quoted_name(candidate_name)}: {_sql(candidates.ids.type)}, rating: float>"
    schema = f"{quoted_name(name)} {id_type}, recommendations array<{entry}>"
    return rows.mapInArrow(recommend, schema)


def _lists(batch: pa.RecordBatch, candidates: Vectors, count: int, candidate_name: str) -> pa.Array:
    """Returns a list of structs for each row of a batch, which has the columns of `rows` in `best_candidates`."""
    row_vectors = torch.tensor(batch.column(1).flatten().to_numpy()).view(batch.num_rows, -1)
    candidate_vectors = torch.from_numpy(candidates.values).T
    excluded = _excluded_scores(batch.column(2), candidates) if batch.num_columns > 2 else None
    size = block_rows(len(candidates.values))
    blocks = []
    for first in range(0, len(row_vectors), size):
        scores = row_vectors[first : first + size] @ candidate_vectors
        if excluded is not None:
            rows, columns = excluded
            in_block = slice(*np.searchsorted(rows, [first, first + size]))
            scores[rows[in_block] - first, columns[in_block]] = NOTHING
        blocks.append(top_k(scores, count))
    ratings, indices = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    is_candidate = ratings > NOTHING
    ids = candidates.ids.take(pa.array(indices[is_candidate].numpy()))
    structs = pa.StructArray.from_arrays(
        [ids, pa.array(ratings[is_candidate].numpy())], names=[candidate_name, "rating"]
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), is_candidate.sum(1).cumsum(0).int()])
    return pa.ListArray.from_arrays(pa.array(offsets.numpy()), structs)


def _excluded_scores(seen: pa.Array, candidates: Vectors) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns row and column of each score to leave out, in the order of rows; `seen` has a list of ids for each."""
    columns = candidates.index.indices(seen.flatten())
    rows = np.repeat(np.arange(len(seen)), seen.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
    is_known = columns >= 0
    return rows[is_known], columns[is_known]


def _load(sent: Sent) -> Vectors:
    """Returns the vectors that the driver has sent, from memory if this process has used them before."""
    if sent.key not in _loaded:
        _loaded.clear()
        _loaded[sent.key] = sent.load()
    return _loaded[sent.key]


def _sql(kind: pa.DataType) -> str:
    """Returns the SQL type of ids."""
    names = {pa.int8(): "tinyint", pa.int16(): "smallint", pa.int32(): "int", pa.int64(): "bigint"}
    return names.get(kind, "string")
