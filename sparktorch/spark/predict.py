"""Scoring as a column: only the inputs travel to Python, the module is built once per process."""

from __future__ import annotations

import gc
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyspark import SparkFiles, TaskContext
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import PandasUDFType, pandas_udf

from sparktorch.artifact import Scorer, TrainedModule
from sparktorch.config import Device, Precision
from sparktorch.spark.files import send_bytes
from sparktorch.spark.resources import choose_device
from sparktorch.spark.session import setting

__all__ = ["INLINE_BYTES", "Scoring", "rechunk", "result_column", "rows_for_udf", "scoring_udf"]

_KEPT_SCORERS = 4
_scorers: OrderedDict[tuple[str, Scoring, str], Scorer] = OrderedDict()

# Weights beyond this size travel once per executor as a file, not with every task.
INLINE_BYTES = 1 << 20


# Types of the fields of the structs that hold ML vectors and images.
_FIELDS: dict[str, pa.DataType] = {
    "type": pa.int8(),
    "size": pa.int32(),
    "indices": pa.list_(pa.int32()),
    "values": pa.list_(pa.float64()),
    "height": pa.int32(),
    "width": pa.int32(),
    "nChannels": pa.int32(),
    "data": pa.binary(),
}


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a module scores.

    Attributes:
        batch_size: The most rows that go through the module at a time.
        device: "cpu", "cuda", or "auto" for a GPU where there is one.
        precision: As for `Scorer`.
        compiled: As for `Scorer`.
        keep_null: Whether a row with a null in it gets a null result, and is no error.
    """

    batch_size: int = 2048
    device: Device = "auto"
    precision: Precision = "fp32"
    compiled: bool = False
    keep_null: bool = False


def scoring_udf(
    spark: SparkSession, trained: TrainedModule, results: Mapping[str, str], scoring: Scoring, *, struct: bool = True
) -> Any:
    """Returns a UDF over the module's inputs.

    Args:
        spark: The session that it is for: large weights are sent to its executors.
        trained: What scores.
        results: Type by name of a result of `Scorer.score`: SQL's, or "vector".
        scoring: How.
        struct: Whether it returns a struct with a field per result, to be read with `result_column`;
            otherwise it returns the only one. Vectors come as arrays.
    """
    names = list(results)
    digest = trained.digest  # computed here, so that the executors' processes agree on it
    file = _ship(spark, trained)
    sent = trained if file is None else replace(trained, weights=b"")
    arrow_udf: Any = getattr(F, "arrow_udf", None)  # pyspark >= 4.1

    # Spark reads the kind of UDF from these annotations; with one input it passes bare arrays.
    def score(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        scorer = _scorer(digest, sent, file, scoring)
        columns = (batch if isinstance(batch, tuple) else (batch,) for batch in batches)
        for chunk in rechunk(columns, scoring.batch_size):
            scored = scorer.score_arrow(chunk, names, keep_null=scoring.keep_null)
            yield pa.StructArray.from_arrays(scored, names=names) if struct else scored[0]

    types = ["array<double>" if kind == "vector" else kind for kind in results.values()]
    fields = [f"`{name}`: {kind}" for name, kind in zip(names, types, strict=True)]
    kind = f"struct<{', '.join(fields)}>" if struct else types[0]
    return arrow_udf(score, kind) if arrow_udf else pandas_scoring_udf(score, kind)


def result_column(scored: Column, name: str, kind: str) -> Column:
    """Returns one result out of the struct that a scoring UDF returned."""
    column = scored[name]
    # Spark's function fails on null.
    return F.when(column.isNotNull(), array_to_vector(column)) if kind == "vector" else column


def rows_for_udf(dataset: DataFrame, column: str) -> DataFrame:
    """Returns the rows as a Python UDF can take them.

    Spark 4.3 keeps the batches of a columnar source as they are, and then fails if there is an ML
    vector among the columns that go past the UDF (UNSUPPORTED_DATATYPE). A filter makes rows of
    them; this one holds for every row, and the optimizer does not see it.

    Args:
        dataset: The user's DataFrame.
        column: A column that the UDF takes.
    """
    columnar = setting(dataset.sparkSession, "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled") == "true"
    if not columnar or '"type":"udt"' not in dataset.schema.json():
        return dataset
    return dataset.where(dataset[column].isNull().cast("int") + 1 > 0)


def rechunk(batches: Iterable[tuple[pa.Array, ...]], size: int) -> Iterator[tuple[pa.Array, ...]]:
    """Joins batches until the next one would make them more than `size` rows."""
    pending: list[tuple[pa.Array, ...]] = []
    rows = 0
    for batch in batches:
        if pending and rows + len(batch[0]) > size:
            yield _joined(pending)
            pending, rows = [], 0
        pending.append(batch)
        rows += len(batch[0])
    if pending:
        yield _joined(pending)


def _joined(batches: list[tuple[pa.Array, ...]]) -> tuple[pa.Array, ...]:
    if len(batches) == 1:
        return batches[0]
    return tuple(pa.concat_arrays(parts) for parts in zip(*batches, strict=True))


def _ship(spark: SparkSession, trained: TrainedModule) -> str | None:
    """Sends large weights to the executors as a file; returns its name, `None` where they are small."""
    if len(trained.weights) <= INLINE_BYTES:
        return None
    name = f"sparktorch-{trained.digest}.safetensors"
    send_bytes(spark, name, trained.weights)
    return name


def _scorer(digest: str, trained: TrainedModule, file: str | None, scoring: Scoring) -> Scorer:
    """Returns this process's scorer for the module, built the first time it is asked for."""
    context = TaskContext.get()
    torch.set_num_threads(max(1, context.cpus()) if context else 1)
    device = _device(context, scoring.device)
    key = (digest, scoring, device)
    if key not in _scorers:
        weights = None
        if file is not None:
            from safetensors.torch import load_file

            weights = load_file(SparkFiles.get(file))  # mapped: the processes of an executor share the pages
        _scorers[key] = Scorer(
            trained,
            device=device,
            batch_size=scoring.batch_size,
            precision=scoring.precision,
            compiled=scoring.compiled,
            weights=weights,
        )
        if len(_scorers) > _KEPT_SCORERS:
            _scorers.popitem(last=False)
        # pyspark collects garbage after every task of a reused worker. To look at all that torch has
        # imported takes longer than many a task.
        gc.freeze()
    _scorers.move_to_end(key)
    return _scorers[key]


def _device(context: TaskContext | None, device: Device) -> str:
    """Returns the torch device of this task: the GPU that Spark assigned, or one of the machine's by process."""
    gpus = context.resources().get("gpu") if context else None
    count = torch.cuda.device_count()
    own = os.getpid() % count if count else 0
    return choose_device(device, gpus.addresses if gpus else [], local_rank=own, local_size=1)


def pandas_scoring_udf(score: Callable[[Iterator[Any]], Iterator[pa.Array]], kind: str) -> Any:
    """Wraps a function over Arrow arrays as a pandas UDF, for pyspark 4.0."""

    def frames(batches: Iterator[Any]) -> Iterator[Any]:
        def arrays() -> Iterator[tuple[pa.Array, ...]]:
            for batch in batches:
                yield tuple(map(_from_pandas, batch if isinstance(batch, tuple) else (batch,)))

        for result in score(arrays()):
            table = pa.RecordBatch.from_struct_array(result) if pa.types.is_struct(result.type) else result
            yield table.to_pandas()

    with warnings.catch_warnings():  # annotations would need pandas at import time in every executor
        warnings.filterwarnings("ignore", message="In Python 3.6\\+ and Spark 3.0\\+")
        return pandas_udf(frames, kind, PandasUDFType.SCALAR_ITER)


def _from_pandas(column: Any) -> pa.Array:
    """Converts a series; an ML vector, or another struct, comes as a frame of its fields, a null row as nulls."""
    if column.ndim == 1:
        return pa.Array.from_pandas(column)
    names = list(column.columns)
    fields = [pa.Array.from_pandas(column[name], type=_FIELDS.get(name)) for name in names]
    return pa.StructArray.from_arrays(fields, names=names, mask=reduce(pc.and_, (field.is_null() for field in fields)))
