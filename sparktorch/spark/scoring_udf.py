"""Scoring as a UDF: Spark sends only the inputs to Python, and each process builds the module once."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch.base.config import Device
from sparktorch.base.devices import device_count, is_host, let_go
from sparktorch.data.columns import TensorSpec
from sparktorch.errors import ConfigError
from sparktorch.model.scorer import Scorer, Scoring, first_batch_size
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.compat import arrow_udf, to_vector
from sparktorch.spark.frame.nested import any_of, unfit
from sparktorch.spark.launch.gpus import choose_device
from sparktorch.spark.session import is_local, switched_on
from sparktorch.spark.shipping import Sent, send

__all__ = [
    *("CHUNK_BYTES", "device_of", "rechunk", "result_column", "rows_for_udf", "scorer_here", "scoring_udf"),
    *("found_in_python", "take_rows_in_sql", "without_invalid"),
]

_LOG = logging.getLogger(__name__)

# From 4.2 on, Spark passes the batches of a columnar source unchanged to Python UDFs if this is true.
_COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"
_KEPT_SCORERS = 4
_scorers: OrderedDict[tuple[str, Scoring, str], Scorer] = OrderedDict()
_fresh: set[tuple[str, Scoring, str]] = set()  # One task alone has used the scorers of these keys.

# A chunk of rows has at most so many bytes in Arrow, unless a single row is larger.
CHUNK_BYTES = 64 << 20


def scoring_udf(
    spark: SparkSession,
    trained: TrainedModule,
    results: Mapping[str, str],
    scoring: Scoring,
    *,
    struct: bool = True,
    stream: bool = False,
) -> Any:
    """Returns a UDF over the module's inputs; the module is sent to the session's executors.

    `results` has, for each result of `Scorer.score` to return, its SQL type, or "vector". If `struct`, the UDF returns
    a struct with a field per result, to be read with `result_column`; otherwise, for SQL, the only result. Vectors are
    returned as arrays.
    """
    names = list(results)
    sent, local = send(spark, trained, stream=stream), is_local(spark)

    def score(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        scorer = scorer_here(sent, scoring, local)
        for chunk in rechunk(batches, first_batch_size(scoring.batch_size)):
            scored = scorer.score_arrow(chunk, names)
            if any("large_list" in str(column.type) for column in scored):
                raise ConfigError(
                    f"the results of {len(scored[0])} rows have more than 2^31 numbers, which no column of Spark's has",
                    hint="set a smaller predictBatchSize",
                    param="predictBatchSize",
                )
            yield pa.StructArray.from_arrays(scored, names=names) if struct else scored[0]

    types = ["array<double>" if kind == "vector" else kind for kind in results.values()]
    fields = [f"`{name}`: {kind}" for name, kind in zip(names, types, strict=True)]
    kind = f"struct<{', '.join(fields)}>" if struct else types[0]
    return arrow_udf(score, kind, trained.inputs, for_sql=not struct)


def result_column(scored: Column, name: str, kind: str) -> Column:
    """Returns one result from the struct that a scoring UDF returned."""
    column = scored[name]
    # `array_to_vector` fails on null.
    return F.when(column.isNotNull(), to_vector(column)) if kind == "vector" else column


def rows_for_udf(dataset: DataFrame, columns: Sequence[Column]) -> DataFrame:
    """Returns the DataFrame in a form that Python UDFs accept; adds a filter that is always true if needed.

    From 4.2 on, Spark passes the batches of a columnar source unchanged to Python UDFs. It has no Arrow type for ML
    vectors and strings with a collation, and fails with UNSUPPORTED_DATATYPE if the used `columns` have such ones. A
    filter converts the batches to rows.
    """
    schema = dataset.schema.json()
    if not ('"type":"udt"' in schema or "__COLLATIONS" in schema):
        return dataset
    if not switched_on(dataset.sparkSession, _COLUMNAR):
        return dataset
    # The optimizer must not recognise the filter as always true. With all columns of the UDF in it, it is rarely
    # turned into a partition filter, which would leave the batches unchanged.
    return dataset.where(F.size(F.array_repeat(F.struct(*columns), 1)) > 0)


def take_rows_in_sql(spark: SparkSession) -> None:
    """Makes Spark pass rows to the Python UDFs of a session, for the reason given in `rows_for_udf`.

    An SQL function knows neither its query nor the source, so only the session's setting helps. A value set by the
    user is kept.
    """
    if spark.conf.get(_COLUMNAR, None) is None and switched_on(spark, _COLUMNAR):
        spark.conf.set(_COLUMNAR, "false")
        _LOG.warning("%s=false is set in this session: otherwise SQL fails on ML vectors in files", _COLUMNAR)


def without_invalid(dataset: DataFrame, columns: Sequence[Column], specs: Sequence[TensorSpec]) -> DataFrame:
    """Returns the rows whose inputs neither are nor hold null, NaN or infinity.

    Inputs whose nulls the model takes are exempt. Spark cannot read numbers in bytes: those rows are `found_in_python`.
    `columns` are expressions that encode the inputs.
    """
    kinds = [field.dataType for field in dataset.select(*columns).schema]
    conditions = [
        unfit(spec, kind, column)
        for column, kind, spec in zip(columns, kinds, specs, strict=True)
        if not spec.takes_nulls
    ]
    return dataset.where(~any_of(conditions)) if conditions else dataset


def found_in_python(specs: Sequence[TensorSpec]) -> bool:
    """Whether some input is bytes of floats: the scorer gives those with NaN or infinity null results."""
    return any(spec.layout == "raw" and spec.dtype.startswith("float") and spec.fill is None for spec in specs)


def rechunk(
    batches: Iterable[tuple[pa.Array, ...]], size: int, limit: int = CHUNK_BYTES
) -> Iterator[tuple[pa.Array, ...]]:
    """Yields batches joined to at most `size` rows and `limit` bytes; splits batches of more than `limit` bytes.

    A batch of more than `size` rows is not split: the scorer splits it evenly.
    """
    pending: list[tuple[pa.Array, ...]] = []
    rows = pending_bytes = 0
    for batch in batches:
        for part, size_bytes in _cut(batch, limit):
            if pending and (rows + len(part[0]) > size or pending_bytes + size_bytes > limit):
                yield _joined(pending)
                pending, rows, pending_bytes = [], 0, 0
            pending.append(part)
            rows += len(part[0])
            pending_bytes += size_bytes
    if pending:
        yield _joined(pending)


def _cut(batch: tuple[pa.Array, ...], limit: int) -> Iterator[tuple[tuple[pa.Array, ...], int]]:
    """Yields a batch, halved until each part has one row or at most `limit` bytes, with the size of each in bytes."""
    rows, size_bytes = len(batch[0]), sum(column.nbytes for column in batch)
    if size_bytes <= limit or rows < 2:
        yield batch, size_bytes
        return
    for half in (slice(0, rows // 2), slice(rows // 2, rows)):
        yield from _cut(tuple(column[half] for column in batch), limit)


def _joined(batches: list[tuple[pa.Array, ...]]) -> tuple[pa.Array, ...]:
    if len(batches) == 1:
        return batches[0]
    return tuple(pa.concat_arrays(parts) for parts in zip(*batches, strict=True))


def scorer_here(sent: Sent, scoring: Scoring, local: bool) -> Scorer:
    """Returns this process's scorer for the module; builds it on first use.

    pyspark collects garbage after every task of a reused worker. What is there once the scorer is built, and once its
    first task has run, is frozen: looking at all the objects of torch and pandas takes longer than many tasks.
    """
    context = TaskContext.get()
    # torch would take all cores of the machine, which other tasks need, too.
    torch.set_num_threads(max(1, context.cpus()) if context else 1)
    device = device_of(context, scoring.device, local)
    key = (sent.key, scoring, device)
    on_other_devices = [cached for cached in _scorers if cached[2] != device and not is_host(cached[2])]
    # The devices of earlier tasks may belong to tasks of others now.
    if on_other_devices and not is_host(device):
        # A frozen module in a reference cycle would never be freed.
        gc.unfreeze()
        for other in on_other_devices:
            del _scorers[other]
            let_go(other[2])
    if key not in _scorers:
        trained, weights = sent.load().unpacked()
        _scorers[key] = Scorer(trained, scoring, device=device, weights=weights)
        if len(_scorers) > _KEPT_SCORERS:
            evicted = weakref.ref(_scorers.popitem(last=False)[1]._plain)
            # A module in a reference cycle is freed by a collection only, and only if it is not frozen.
            if evicted() is not None:
                gc.unfreeze()
                gc.collect()
        gc.freeze()
        _fresh.add(key)
    elif key in _fresh:
        # The first task may have imported much: Arrow imports pandas.
        gc.freeze()
        _fresh.remove(key)
    _scorers.move_to_end(key)
    return _scorers[key]


def device_of(context: TaskContext | None, device: Device, local: bool) -> str:
    """Returns the torch device of this task: the GPU that Spark assigned, or one of the machine's, by process id.

    Outside of Spark's `local` mode, "auto" uses no GPU that Spark has not assigned: other jobs may use it, and each
    process on it needs memory for a CUDA context and a copy of the module.
    """
    gpus = context.resources().get("gpu") if context else None
    if device == "auto" and gpus is None and not local:
        return "cpu"
    count = 0 if device == "cpu" else device_count(None if device == "auto" else device)
    index = os.getpid() % count if count else 0
    return choose_device(device, gpus.addresses if gpus else [], local_rank=index, local_size=1)
