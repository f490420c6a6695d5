"""Scoring as a column: only the inputs travel to Python, the module is built once per process."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import torch
from pyspark import TaskContext
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import PandasUDFType, pandas_udf

from sparktorch.artifact import Scorer, TrainedModule
from sparktorch.data.tensors import to_arrow

__all__ = ["scoring_column"]

_KEPT_SCORERS = 4
_scorers: OrderedDict[tuple[str, int], Scorer] = OrderedDict()


def scoring_column(
    trained: TrainedModule, columns: Sequence[Column], fields: dict[str, str], *, batch_size: int
) -> Column:
    """Returns a struct column with one field per entry of `fields`.

    Args:
        trained: What scores.
        columns: One column per input, cast as the module's specs say.
        fields: SQL type by name of a result of `Scorer.score`.
        batch_size: Rows that go through the module at a time.
    """
    names = list(fields)
    digest = trained.digest  # computed here, so that the executors' processes agree on it

    # Spark reads the kind of UDF from these annotations; with one input it passes bare arrays.
    def score(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        scorer = _scorer(digest, trained, batch_size)
        for batch in batches:
            results = scorer.score(batch if isinstance(batch, tuple) else (batch,))
            yield pa.StructArray.from_arrays([to_arrow(results[name]) for name in names], names=names)

    return_type = "struct<" + ", ".join(f"`{name}`: {kind}" for name, kind in fields.items()) + ">"
    arrow_udf: Any = getattr(F, "arrow_udf", None)  # pyspark >= 4.1
    udf = arrow_udf(score, return_type) if arrow_udf else pandas_scoring_udf(score, return_type)
    scored: Column = udf(*columns)
    return scored


def _scorer(digest: str, trained: TrainedModule, batch_size: int) -> Scorer:
    """Returns this process's scorer for the module, built the first time it is asked for."""
    context = TaskContext.get()
    torch.set_num_threads(max(1, context.cpus()) if context else 1)
    key = (digest, batch_size)
    if key not in _scorers:
        _scorers[key] = Scorer(trained, batch_size=batch_size)
        if len(_scorers) > _KEPT_SCORERS:
            _scorers.popitem(last=False)
    _scorers.move_to_end(key)
    return _scorers[key]


def pandas_scoring_udf(score: Callable[[Iterator[Any]], Iterator[pa.Array]], kind: str) -> Any:
    """Wraps a function over Arrow arrays as a pandas UDF, for pyspark 4.0."""

    def frames(batches: Iterator[Any]) -> Iterator[Any]:
        def arrays() -> Iterator[tuple[pa.Array, ...]]:
            for batch in batches:
                yield tuple(map(pa.Array.from_pandas, batch if isinstance(batch, tuple) else (batch,)))

        for result in score(arrays()):
            yield pa.Table.from_struct_array(result).to_pandas()

    with warnings.catch_warnings():  # annotations would need pandas at import time in every executor
        warnings.filterwarnings("ignore", message="In Python 3.6\\+ and Spark 3.0\\+")
        return pandas_udf(frames, kind, PandasUDFType.SCALAR_ITER)
