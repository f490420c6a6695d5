"""Rows that stay with their ranks: read once, fitted on any number of times."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from pyspark.sql import DataFrame, SparkSession

from sparktorch.base.config import Task
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.attempts import one_rank, partitioned, run_on_rows, with_slots
from sparktorch.ml.fit.first_row_trial import Ready, try_out
from sparktorch.ml.fit.listeners import FitReport
from sparktorch.ml.fit.translate import Request, translate
from sparktorch.ml.params.mixins import EstimatorParams
from sparktorch.spark.checks.doctor import check_executors
from sparktorch.spark.checks.findings import refuse
from sparktorch.spark.checks.preflight import check_cluster
from sparktorch.spark.frame.prepare import Frame, prepare
from sparktorch.spark.launch.barrier_job import control_server
from sparktorch.spark.launch.gpus import gpu_profile, on_cpus
from sparktorch.spark.launch.rank_pool import RankPool, Results
from sparktorch.spark.launch.spark_job import new_tag
from sparktorch.spark.session import check_running, slots
from sparktorch.train.strategies.registry import check_device, strategy_type
from sparktorch.worker import RankJob, RankResult, TrainJob, run_held, serve, train_held, train_partition

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FreshData", "PreparedData", "Source", "launchable", "make_room", "needs_other_rows", "obstacle"]

J = TypeVar("J", bound=RankJob)

_LOG = logging.getLogger(__name__)
_in_this_process: WeakSet[PreparedData] = WeakSet()


class FreshData:
    """A DataFrame that is read for one fit.

    Attributes:
        dataset: The DataFrame.
        title: What the progress bar of the fit says.
        bar_stays: Whether the bar stays on the screen after the fit.
        began: When the fit has begun, by `time.perf_counter`, if that was before it asks for its rows.
    """

    def __init__(self, dataset: DataFrame, began: float | None = None) -> None:
        self.dataset, self.title, self.bar_stays, self.began = dataset, "fit", True, began

    def prepared(self, estimator: EstimatorParams, task: Task, report: FitReport) -> Ready:
        """Runs all checks that need no training job; returns what the job needs."""
        request = launchable(translate(estimator, task), self.dataset.sparkSession)
        frame = prepare(self.dataset, task, **request.columns)
        return try_out(estimator, request, frame, partial(one_rank, frame.data.sparkSession, request, report))

    def attempt(self, data: DataFrame, request: Request[TrainJob], report: FitReport) -> Results:
        """Trains in a barrier job of its own."""
        return run_on_rows(data, request, report, train_partition)


def obstacle(request: Request[Any], spark: SparkSession) -> ConfigError | None:
    """Returns why ranks cannot hold rows for several fits, if so: they get the later ones from the driver."""
    if request.folds:
        what, hint = "strategyParams.folds gives every worker all rows", "fit on the DataFrame"
        return ConfigError(what, hint=hint, param="strategyParams")
    server = control_server(spark, request.launch)
    if server is None:
        what = "ranks that hold rows get each fit from the driver, which they do not reach"
        hint = "leave rendezvous at 'auto', and run where executors reach this process; or fit on the DataFrame"
        return ConfigError(what, hint=hint, param="rendezvous")
    server.close()
    return None


def needs_other_rows(params: Sequence[str]) -> ConfigError:
    """Returns the error that an estimator differs, in some Params, from the one that has prepared rows."""
    return ConfigError(
        f"the estimator needs other rows than the prepared ones: it differs in {', '.join(params)}",
        hint="prepare the DataFrame with this estimator, or fit on the DataFrame",
        param=params[0],
    )


class PreparedData:
    """Rows that ranks hold, in one barrier job, from the first fit until `close`.

    `estimator.fit(prepared)` trains on them without reading the DataFrame again; so do other estimators that need the
    same rows. The model is the same, bit for bit, as that of `fit` on the DataFrame. The job holds one slot per worker
    all the time. It ends after `idleTimeout` seconds without a fit, or if a worker is lost; the next fit then reads the
    DataFrame again.

    Fits on the same rows from several threads run one after another. If the ranks hold all slots, another fit of this
    process, or the `transform` of a model, makes idle ones free them, with a warning; the next fit then reads again.

    Example:
        >>> linear = {"in_features": 1, "out_features": 1}
        >>> estimator = TorchRegressor(module="torch.nn:Linear", moduleParams=linear, batchSize=5, progress=False)
        >>> rows = [([float(i)], float(3 * i)) for i in range(20)]
        >>> data = spark.createDataFrame(rows, "features array<float>, label float")
        >>> with estimator.prepare(data) as prepared:
        ...     models = [estimator.fit(prepared, {estimator.learningRate: rate}) for rate in (0.1, 0.01)]
        >>> len(models)
        2
    """

    def __init__(
        self,
        estimator: EstimatorParams,
        task: Task,
        dataset: DataFrame,
        *,
        idle_timeout: float,
        gives_way: bool = False,
    ) -> None:
        """Reads nothing yet; see `TorchEstimatorBase.prepare`.

        The rows are those that `estimator` needs. The ranks end after `idle_timeout` seconds without a fit, and
        `make_room` may end them when idle if they give way.
        """
        self.estimator, self.gives_way, self._busy = estimator, gives_way, False
        self.dataset, self.title, self.bar_stays = dataset, "fit", True
        self._idle_timeout = idle_timeout
        request = translate(estimator, task)
        refusal = obstacle(request, dataset.sparkSession)
        if refusal is not None:
            raise refusal
        self._needs = request.rows
        self._frame: Frame | None = None
        self._pool: RankPool | None = None
        self._read_with: Request[TrainJob] | None = None
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._closed = False
        _in_this_process.add(self)
        self._more_columns: dict[str, Any] = {}
        self._without: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Says what the ranks hold."""
        pool = self._pool
        if pool is None or not pool.is_open:
            return f"PreparedData({'closed' if self._closed else 'no slots held'})"
        rows = sum(fact["rows"] + fact["validation_rows"] for fact in pool.facts)
        held = sum(fact["bytes"] for fact in pool.facts)
        size = f"{held / 1e6:,.1f} MB" if held >= 1e5 else f"{held / 1e3:,.1f} KB"
        return f"PreparedData({len(pool.facts)} slots held, {rows:,} rows, {size})"

    def close(self) -> None:
        """Ends the ranks, which frees their rows and slots; can be called twice. Waits for a running fit."""
        with self._lock:
            self._closed = True
            self.let_go()

    def cancel(self) -> None:
        """Ends the ranks at once and for good, also in the middle of a fit of another thread, which then fails."""
        self._closed = True
        pool = self._pool
        if pool is not None:
            pool.interrupt()

    def prepared(self, estimator: EstimatorParams, task: Task, report: FitReport) -> Ready:
        """Runs all checks that need no training job; returns what the training needs.

        A `ConfigError` says that it is closed, or that the estimator needs other rows.
        """
        with self._lock:
            try:
                return self._checked(estimator, task, report)
            finally:  # The time may have run out meanwhile, and a check that raises starts no attempt.
                self._wait_for_more()

    def _checked(self, estimator: EstimatorParams, task: Task, report: FitReport) -> Ready:
        self._check_open()
        request = translate(estimator, task)
        self._check_needs(request, judged=report.judge is not None)
        spark, pool = self.dataset.sparkSession, self._pool
        if pool is not None and pool.is_open:
            request = _with_profile(request, spark)
            # With the tag of this job, a restart waits for its tasks to end.
            request = request.with_launch(tag=pool.tag, world_size=len(pool.facts))
            in_worker = partial(_in_ranks, pool, report)
        else:
            request = launchable(request, spark, self)
            in_worker = partial(one_rank, spark, request, report)
        if self._frame is None:
            self._frame = prepare(self.dataset, task, **request.columns, **self._more_columns)
        return try_out(estimator, request, self._frame, in_worker)

    def attempt(self, data: DataFrame, request: Request[TrainJob], report: FitReport) -> Results:
        """Trains in the ranks; starts them if they do not run, or hold other rows than the job needs.

        A `ConfigError` says that it was cancelled meanwhile: what is lost in that way does not start again.
        """
        with self._lock:
            self._busy = True
            try:
                self._check_open()
                if self._pool is not None and self._pool.is_open and self._fits(request):
                    return self._run(request.job, report)
                launch = request.launch
                # Tasks are cancelled and counted by tag: those of the ranks that end now must not pass for new ones.
                if self._pool is not None and self._pool.tag == launch.tag:
                    launch = replace(launch, tag=new_tag())
                self.let_go()
                self._read_with = request

                def start(parts: DataFrame, read_with: TrainJob) -> Results:
                    self._pool = pool = RankPool(parts, partial(serve, job=read_with.without_recipe), launch)
                    self._check_open()
                    ended = pool.start()
                    if ended is not None:
                        return ended
                    _LOG.info("%r", self)
                    self._look_at(pool.facts, read_with)
                    return self._run(request.job, report)

                return partitioned(data, request, start)
            finally:
                self._busy = False
                self._wait_for_more()

    def give_way(self) -> None:
        """Ends the ranks if no fit runs on them; the next fit reads the rows again."""
        if self._lock.acquire(blocking=False):
            try:
                if self._pool is not None and not self._busy:
                    _LOG.warning("%r gives way to a job that needs its slots; its next fit reads again", self)
                    self.let_go()
            finally:
                self._lock.release()

    def let_go(self) -> None:
        """Ends the ranks, which frees their slots; the next fit reads the rows again."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.close()

    @property
    def slots_held(self) -> int:
        """Number of slots that the ranks hold."""
        pool = self._pool
        return len(pool.facts) if pool is not None and pool.is_open else 0

    def _run(self, job: TrainJob, report: FitReport) -> Results:
        assert self._pool is not None
        judge = report.judge
        task = partial(train_held, job=job, judged=judge is not None, without=self._without)
        return self._pool.run(task, report, judge)

    def _look_at(self, facts: list[dict[str, Any]], read_with: TrainJob) -> None:
        """Receives what the ranks tell of the rows that they have read; subclasses may refuse them."""

    def _fits(self, request: Request[TrainJob]) -> bool:
        """Whether the ranks hold what a fit needs: a restart may have fewer ranks, a module other classes."""
        read = self._read_with
        assert read is not None
        same_rows = (request.job.columns, request.job.storage) == (read.job.columns, read.job.storage)
        return same_rows and request.launch.world_size == read.launch.world_size

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("the prepared rows are closed", hint="prepare the DataFrame again")
        check_running(self.dataset.sparkSession)

    def _check_needs(self, request: Request[TrainJob], *, judged: bool) -> None:
        strategy = request.job.config.strategy
        if judged and strategy_type(strategy).own_batches:
            raise ConfigError(
                f"strategy {strategy!r} trains a model in each worker, and a trial is judged as a whole",
                hint="use another strategy in a search",
                param="strategy",
            )
        differing = [name for name, value in request.rows.items() if value != self._needs[name]]
        if differing:
            raise needs_other_rows(differing)

    def _wait_for_more(self) -> None:
        """Starts the time after which ranks without work are ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pool is not None and not self._closed:
            self._timer = threading.Timer(self._idle_timeout, self._time_out)
            self._timer.daemon = True
            self._timer.start()

    def _time_out(self) -> None:
        if self._lock.acquire(blocking=False):  # If the lock is taken, a fit has begun.
            try:
                _LOG.info("no fit for %.0f s: %r lets go of its slots", self._idle_timeout, self)
                self.let_go()
            finally:
                self._lock.release()


Source = FreshData | PreparedData


def _in_ranks(pool: RankPool, report: FitReport, body: Callable[..., RankResult]) -> Results:
    """Runs a body in ranks that hold rows."""
    return pool.run(partial(run_held, body=body), report)


def make_room(spark: SparkSession, count: int, *, without: PreparedData | None = None) -> None:
    """Makes idle ranks of this process, but for those of `without`, free their slots if fewer than `count` are free."""
    holding = [held for held in list(_in_this_process) if held is not without and held.slots_held]
    total = slots(spark) if holding else None
    if total is None:
        return
    for held in holding:
        if held.gives_way and total - sum(other.slots_held for other in holding) < count:
            held.give_way()


def _with_profile(request: Request[J], spark: SparkSession) -> Request[J]:
    """Returns a request with its resource profile, once the options of its strategy suit the devices."""
    if on_cpus(spark, request.launch.device, request.launch.world_size):
        check_device(request.job.config, "cpu")
    return request.with_launch(profile=gpu_profile(spark, request.launch.device, request.launch.world_size))


def launchable(request: Request[J], spark: SparkSession, without: PreparedData | None = None) -> Request[J]:
    """Returns a request with its resource profile, once the cluster is checked for it, and idle ranks have made room.

    Ranks of `without` stay.
    """
    request = _with_profile(request, spark)
    launch = request.launch
    make_room(spark, launch.world_size, without=without)
    least, most = request.workers
    check_cluster(spark, least, launch.profile, most=most, longest=launch.patience.start)
    if least < most:
        request = with_slots(spark, request)
    if request.preflight == "full":
        checkpoint = request.job.checkpoint
        refuse(check_executors(spark, request.launch, checkpoint.directory if checkpoint else None))
    return request
