"""`run`: a user's function, or script, in the ranks of one barrier job."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pyspark import RDD
from pyspark.sql import DataFrame, SparkSession

from sparktorch.distributed.root_cause import ChainError
from sparktorch.errors import ConfigError, shortens
from sparktorch.ml.fit.attempts import run_on_rows, with_restarts
from sparktorch.ml.fit.checks import check_ships, naming_params
from sparktorch.ml.fit.first_row_trial import first_inputs
from sparktorch.ml.fit.listeners import Fit, FitReport
from sparktorch.ml.fit.prepared_data import launchable
from sparktorch.ml.fit.translate import Request, translate_run
from sparktorch.ml.params.mixins import RunParams
from sparktorch.spark.frame.prepare import prepare
from sparktorch.spark.launch.barrier_job import run_ranks
from sparktorch.spark.launch.rank_pool import Results
from sparktorch.spark.launch.rank_task import Body
from sparktorch.spark.rdd import dataframe_of, is_rdd, moved
from sparktorch.spark.session import session_of
from sparktorch.worker import RankJob, called, run_function, run_on_elements, run_on_partition, run_script_in_rank

__all__ = ["collective_map", "run", "run_script"]

_SHIPPING_HINT = "make what it holds inside it, or pass it as args"


def run(
    function: Callable[..., Any],
    data: DataFrame | RDD[Any] | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    spark: SparkSession | None = None,
    **params: Any,
) -> list[Any]:
    """Calls a function in every rank of one barrier job; returns what it returned in each, in rank order.

    The function gets a `sparktorch.RunContext`, which has the rank's rows as global batches, collectives, strategies
    and checkpoints, and then `args` and `kwargs`. Ranks fail, stall, restart and log as those of a fit do.

    Example:
        >>> def total(context, factor):
        ...     return context.all_reduce(factor * context.rank)
        >>> sparktorch.run(total, numWorkers=2, args=[10])
        [10, 10]

    Args:
        function: Called as `function(context, *args, **kwargs)`. It is sent to the ranks by Spark's cloudpickle.
        data: The rows, as a DataFrame, or an RDD as `to_dataframe` takes it; `None` for none.
        args: Further positional arguments.
        kwargs: Keyword arguments.
        spark: The session of a run without rows; by default the active one, or a new one.
        **params: Params, as docs/params.md describes them: numWorkers, featuresCol or inputCols, labelCol, weightCol,
            batchSize, epochs, seed, strategy, checkpointDir, maxRestarts and others. `help(sparktorch.RunParams)` lists
            them. `labelCol` is not set by default.

    Raises:
        ConfigError: A Param is unknown or out of range, or the function cannot be shipped.
        ColumnError: A column is missing or mistyped, or a row cannot be used.
        ClusterError: The cluster cannot run the job.
        RankError: A rank raised; names it, with its traceback.
    """
    run_params = _run_params(params)
    request = translate_run(run_params, function)
    call = _shippable(run_params, function, args, kwargs)
    rows = None if data is None else dataframe_of(data, "run")
    session = session_of(rows) if spark is None or rows is not None else spark

    def attempt(report: FitReport, request: Request[RankJob], data: DataFrame | None = None) -> Results:
        if data is None:
            return _without_rows(session, report, partial(run_function, job=request.job, function=call), request)
        return run_on_rows(data, request, report, partial(run_on_partition, function=call))

    results = _results(run_params, request, session, attempt, rows)
    return [pickle.loads(payload) for _, payload in results]


def collective_map(
    rdd: RDD[Any],
    function: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **params: Any,
) -> list[Any]:
    """Calls a function on every partition of an RDD, in one barrier job with an open process group.

    It returns results, not an RDD: ranks that work together cannot be recomputed one by one. If a rank is lost, all of
    them run again, at most `maxRestarts` times.

    Example:
        >>> def total(elements, context):
        ...     return context.all_reduce(sum(elements))
        >>> sparktorch.collective_map(sc.parallelize(range(10), 2), total)
        [45, 45]

    Args:
        rdd: The RDD; each partition becomes a rank.
        function: Called as `function(elements, context, *args, **kwargs)`, with an iterator over the elements and a
            `RunContext` without rows.
        args: Further positional arguments.
        kwargs: Keyword arguments.
        **params: Params as for `run`, of the job: device, maxRestarts, stallTimeout and others.

    Returns:
        What the function returned, in the order of the partitions.

    Raises:
        ConfigError: It is not an RDD, a Param is unknown or out of range, or the function cannot be shipped.
        ClusterError: The cluster cannot run the job, such as with fewer slots than partitions.
        RankError: A rank raised; names it, with its traceback.
    """
    if not is_rdd(rdd):
        raise ConfigError(
            f"collective_map takes an RDD of classic Spark, and got a {type(rdd).__name__}",
            hint="sparktorch.run(function, df) takes DataFrames, on Spark Connect as well",
            param="rdd",
        )
    ranks = rdd.getNumPartitions()
    if params.setdefault("numWorkers", ranks) != ranks:
        raise ConfigError(
            f"numWorkers is {params['numWorkers']}, and the RDD has {ranks} partitions, each of which becomes a worker",
            hint="leave numWorkers out, or repartition the RDD",
            param="numWorkers",
        )
    run_params = _run_params({**params, "split": "keep"})
    request = translate_run(run_params, function)
    call = _shippable(run_params, function, args, kwargs, first="elements, context")

    def attempt(report: FitReport, request: Request[RankJob]) -> Results:
        body = partial(run_on_elements, job=request.job, function=call)
        # Spark runs no barrier job behind coalesce() or union(): the elements then go through a shuffle first.
        with suppress(ChainError):
            return run_ranks(rdd, body, request.launch, report)
        return run_ranks(moved(rdd), body, request.launch, report)

    results = _results(run_params, request, session_of(rdd), attempt)
    return [pickle.loads(payload) for _, payload in results]


def run_script(path: str | Path, arguments: Sequence[str] = (), *, spark: SparkSession, **params: Any) -> None:
    """Runs a script that torchrun could start, in every rank of one barrier job.

    Each rank has the environment that torchrun gives: `init_process_group` without arguments joins the ranks.

    Args:
        path: The script; modules beside it have to be on the executors, as with `--py-files`.
        arguments: Its arguments.
        spark: The session.
        **params: As for `run`.

    Raises:
        ConfigError: A Param is unknown or out of range.
        FileNotFoundError: There is no such file on this machine.
        RankError: A rank raised, or ended with an exit status that is not 0.
    """
    file = Path(path)
    source = file.read_text(encoding="utf-8")
    run_params = _run_params(params)
    run_params._resetUid(f"run {file.name}")
    request = translate_run(run_params, file.name)
    body = partial(run_script_in_rank, path=file.resolve(), source=source, arguments=list(arguments))

    def attempt(report: FitReport, request: Request[RankJob]) -> Results:
        return _without_rows(spark, report, body, request)

    _results(run_params, request, spark, attempt)


@shortens
def _results(
    run_params: RunParams,
    request: Request[RankJob],
    spark: SparkSession,
    attempt: Callable[..., Results],
    rows: DataFrame | None = None,
) -> Results:
    """Runs ranks by `attempt(report, request)`; if they get `rows`, it is also called with these, prepared."""
    with FitReport(Fit(estimator=run_params, spark=spark), title="run") as report:
        request = launchable(request, spark)
        if rows is None:
            run_once = partial(attempt, report)
            report.prepared(None)
        else:
            with naming_params(run_params):
                frame, _ = first_inputs(prepare(rows, "generic", **request.columns))
            request = request.with_job(columns=frame.columns, placeholder=frame.sample)
            run_once = partial(attempt, report, data=frame.data)
            report.prepared(frame.columns)
        results = with_restarts(spark, request, run_once, report.attempts)
        report.ended()
    return results


def _shippable(
    params: RunParams,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    first: str = "context",
) -> Callable[..., Any]:
    """Names a run by its function; returns the function with its arguments, to be called with what is `first`."""
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    params._resetUid(f"run {name}")
    is_sequence = isinstance(args, Iterable) and not isinstance(args, str | bytes | Mapping)
    if not is_sequence or not isinstance({} if kwargs is None else kwargs, Mapping):
        raise ConfigError(
            f"args is {args!r} and kwargs {kwargs!r}",
            hint="args is a list or tuple, and kwargs a dict: args=[0.1], kwargs={'lr': 0.1}",
            param="args",
        )
    keywords = dict(kwargs or {})
    _check_arguments(function, first, args, keywords)
    call = partial(called, function, tuple(args), keywords)
    check_ships(call, f"function {name}, or an argument of it,", param="function", hint=_SHIPPING_HINT)
    return call


def _check_arguments(
    function: Callable[..., Any], first: str, args: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    try:
        inspect.signature(function, follow_wrapped=False).bind(*first.split(", "), *args, **keywords)
    except ValueError:  # A builtin may have no signature.
        return
    except TypeError as error:
        raise ConfigError(
            f"function {getattr(function, '__qualname__', function)} cannot be called: {error}",
            hint=f"it is a callable, and gets ({first}, *args, **kwargs)",
            param="function",
        ) from error


def _run_params(values: Mapping[str, Any]) -> RunParams:
    try:
        return RunParams(**values)
    except TypeError as error:
        raise ConfigError(
            str(error).replace("RunParams()", "run()"),
            hint="docs/params.md lists the Params; arguments of the function go into args=[...] and kwargs={...}",
        ) from error


def _without_rows(spark: SparkSession, report: FitReport, body: Body, request: Request[RankJob]) -> Results:
    """Runs a body in a barrier job whose ranks get no rows."""
    count = request.launch.world_size
    return run_ranks(spark.range(0, count, 1, count), body, request.launch, report)
