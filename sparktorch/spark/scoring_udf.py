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
    "CHUNK_BYTES",
    "device_of",
    "found_in_python",
    "rechunk",
    "result_column",
    "rows_for_udf",
    "scorer_here",
    "scoring_udf",
    "take_rows_in_sql",
    "without_invalid",
]

_LOG = logging.getLogger(__name__)

# From 4.2 on, Spark passes the batches of a columnar source unchanged to Python UDFs if this is true.
_COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"

# The last scorers of this process, by their modules' keys, their settings and their devices.
_KEPT_SCORERS = 4
_ScorerKey = tuple[str, Scoring, str]
_scorers: OrderedDict[_ScorerKey, Scorer] = OrderedDict()
# Only the task that has built the scorers with these keys has used them yet.
_fresh: set[_ScorerKey] = set()

# The most bytes, in Arrow, of a chunk of rows, unless a single row is larger.
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

    `results` names the results of `Scorer.score` to return, each with its SQL type, or "vector". With `struct`, the UDF
    returns a struct with a field per result, to be read with `result_column`. Without it, the UDF is for SQL, and
    returns its only result. Vectors are returned as arrays. `stream` says that the rows come from a stream.
    """
    names = list(results)
    sent = send(spark, trained, stream=stream)
    local = is_local(spark)

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

    sql_types = ["array<double>" if sql == "vector" else sql for sql in results.values()]
    if struct:
        fields = [f"`{name}`: {sql}" for name, sql in zip(names, sql_types, strict=True)]
        result_type = f"struct<{', '.join(fields)}>"
    else:
        result_type = sql_types[0]
    return arrow_udf(score, result_type, trained.inputs, for_sql=not struct)


def result_column(scored: Column, name: str, sql_type: str) -> Column:
    """Returns one result from the struct that a scoring UDF returned; `sql_type` is as in `results` of the UDF."""
    column = scored[name]
    # Spark's `array_to_vector` fails on null.
    return F.when(column.isNotNull(), to_vector(column)) if sql_type == "vector" else column


def rows_for_udf(dataset: DataFrame, columns: Sequence[Column]) -> DataFrame:
    """Returns the DataFrame in a form that Python UDFs accept; adds a filter that is always true if needed.

    From 4.2 on, Spark passes the batches of a columnar source unchanged to Python UDFs. It has no Arrow type for ML
    vectors and for strings with a collation, and fails with UNSUPPORTED_DATATYPE if the UDF's `columns` have such
    types. A filter makes Spark convert the batches to rows.
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
    """Makes Spark pass rows, not batches of columns, to the Python UDFs of a session; `rows_for_udf` says why.

    An SQL function knows neither its query nor the source, so only the session's setting helps. The user's value stays.
    """
    if spark.conf.get(_COLUMNAR, None) is None and switched_on(spark, _COLUMNAR):
        spark.conf.set(_COLUMNAR, "false")
        _LOG.warning("%s=false is set in this session: otherwise SQL fails on ML vectors in files", _COLUMNAR)


def without_invalid(dataset: DataFrame, columns: Sequence[Column], specs: Sequence[TensorSpec]) -> DataFrame:
    """Returns the rows whose inputs neither are nor hold null, NaN or infinity.

    Inputs whose nulls the model takes are exempt. So are numbers in bytes, which Spark cannot read; `found_in_python`
    says whether there are such inputs. `columns` are the expressions that encode the inputs.
    """
    kinds = [field.dataType for field in dataset.select(*columns).schema]
    conditions = [
        unfit(spec, kind, column)
        for column, kind, spec in zip(columns, kinds, specs, strict=True)
        if not spec.takes_nulls
    ]
    return dataset.where(~any_of(conditions)) if conditions else dataset


def found_in_python(specs: Sequence[TensorSpec]) -> bool:
    """Whether some input is bytes of floats, in which the scorer finds NaN and infinity; it returns null for them."""
    return any(spec.layout == "raw" and spec.dtype.startswith("float") and spec.fill is None for spec in specs)


def rechunk(
    batches: Iterable[tuple[pa.Array, ...]], size: int, limit: int = CHUNK_BYTES
) -> Iterator[tuple[pa.Array, ...]]:
    """Yields batches joined to at most `size` rows and `limit` bytes; splits batches of more than `limit` bytes.

    A batch of more than `size` rows is not split: the scorer splits it evenly.
    """
    pending: list[tuple[pa.Array, ...]] = []
    pending_rows = pending_bytes = 0
    for batch in batches:
        for part, part_bytes in _cut(batch, limit):
            part_rows = len(part[0])
            if pending and (pending_rows + part_rows > size or pending_bytes + part_bytes > limit):
                yield _join(pending)
                pending = []
                pending_rows = pending_bytes = 0
            pending.append(part)
            pending_rows += part_rows
            pending_bytes += part_bytes
    if pending:
        yield _join(pending)


def _cut(batch: tuple[pa.Array, ...], limit: int) -> Iterator[tuple[tuple[pa.Array, ...], int]]:
    """Yields the parts of a batch, halved until each has one row or at most `limit` bytes, and their sizes in bytes."""
    rows = len(batch[0])
    size = sum(column.nbytes for column in batch)
    if size <= limit or rows < 2:
        yield batch, size
        return
    for half in (slice(0, rows // 2), slice(rows // 2, rows)):
        yield from _cut(tuple(column[half] for column in batch), limit)


def _join(batches: list[tuple[pa.Array, ...]]) -> tuple[pa.Array, ...]:
    if len(batches) == 1:
        return batches[0]
    return tuple(pa.concat_arrays(parts) for parts in zip(*batches, strict=True))


def scorer_here(sent: Sent, scoring: Scoring, local: bool) -> Scorer:
    """Returns this process's scorer for the module; builds it on first use.

    pyspark collects garbage after every task of a reused worker. To look at all the objects of torch and pandas takes
    longer than many tasks. So the objects that exist once the scorer is built, and once its first task has run, are
    frozen, which exempts them.
    """
    context = TaskContext.get()
    # torch would take all cores of the machine, which other tasks need, too.
    torch.set_num_threads(max(1, context.cpus()) if context else 1)
    device = device_of(context, scoring.device, local)
    if not is_host(device):
        _leave_other_devices(device)
    key = (sent.key, scoring, device)
    if key not in _scorers:
        trained, weights = sent.load().unpack()
        _scorers[key] = Scorer(trained, scoring, device=device, weights=weights)
        if len(_scorers) > _KEPT_SCORERS:
            _evict_oldest()
        gc.freeze()
        _fresh.add(key)
    elif key in _fresh:
        # The first task may have imported much: Arrow imports pandas.
        gc.freeze()
        _fresh.remove(key)
    _scorers.move_to_end(key)
    return _scorers[key]


def _leave_other_devices(device: str) -> None:
    """Drops the scorers on other accelerators, which Spark may have given to other processes since."""
    on_other_devices = [key for key in _scorers if key[2] != device and not is_host(key[2])]
    if on_other_devices:
        # A frozen module in a reference cycle would never be freed.
        gc.unfreeze()
    for key in on_other_devices:
        del _scorers[key]
        let_go(key[2])


def _evict_oldest() -> None:
    """Drops the scorer that was used the longest ago, and frees its module."""
    _, scorer = _scorers.popitem(last=False)
    evicted = weakref.ref(scorer._uncompiled)
    del scorer
    # A module in a reference cycle is freed by a collection only, and only if it is not frozen.
    if evicted() is not None:
        gc.unfreeze()
        gc.collect()


def device_of(context: TaskContext | None, device: Device, local: bool) -> str:
    """Returns the torch device of this task: the GPU that Spark assigned, or one of the machine's GPUs, by process id.

    Outside of Spark's `local` mode, "auto" uses no GPU that Spark has not assigned: other jobs may use the GPU, and
    each process on it needs memory for a CUDA context and a copy of the module.
    """
    gpus = context.resources().get("gpu") if context else None
    if device == "auto" and gpus is None and not local:
        return "cpu"
    count = 0 if device == "cpu" else device_count(None if device == "auto" else device)
    index = os.getpid() % count if count else 0
    return choose_device(device, gpus.addresses if gpus else [], local_rank=index, local_size=1)
