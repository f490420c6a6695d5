"""The estimators: Params in, a fitted model out."""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyspark import keyword_only
from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame, SparkSession

from sparktorch.base.config import Task
from sparktorch.distributed.root_cause import ChainError
from sparktorch.errors import ConfigError, RankLostError
from sparktorch.ml.fit.first_row_trial import try_out
from sparktorch.ml.fit.listeners import Fit, FitReport, callers
from sparktorch.ml.fit.translate import Request, check_param_names, check_thresholds, given, translate
from sparktorch.ml.model import TorchModel, TorchModelBase
from sparktorch.ml.params import (
    DEFAULTS,
    CheckpointParams,
    InputParams,
    LabelColumns,
    LaunchParams,
    ModuleParams,
    NumericsParams,
    OutputColumns,
    ScoringParams,
    StorageParams,
    TrackingParams,
    TrainingParams,
    ValidationParams,
)
from sparktorch.ml.persistence import EstimatorReader, EstimatorWriter
from sparktorch.ml.scoring.column_metadata import labels_of
from sparktorch.ml.summary import TrainingSummary
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.checks.check_result import refuse
from sparktorch.spark.checks.doctor import check_executors
from sparktorch.spark.checks.preflight import check_cluster, check_result_size, settled_slots
from sparktorch.spark.frame.partition import keep, moved_as_they_are, split, split_into_folds
from sparktorch.spark.frame.prepare import Frame, prepare
from sparktorch.spark.launch.barrier_job import run_ranks
from sparktorch.spark.launch.gpus import gpu_profile
from sparktorch.spark.launch.spark_job import new_tag
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.train.recipe.dry_run import Trial
from sparktorch.train.strategies.registry import strategy_options
from sparktorch.worker import TrainJob, train_partition

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from typing_extensions import Self

__all__ = ["TorchEstimator", "TorchEstimatorBase"]

M = TypeVar("M", bound=TorchModelBase)

Results = list[tuple[dict[str, Any], bytes]]  # of every rank

_LOG = logging.getLogger(__name__)
_LONGEST_PAUSE = 30.0  # before a restart, in seconds
_COMEBACK_SECONDS = 10.0  # for executors that Spark starts again
_COLLECTIVE_SECONDS = 1800.0


class TorchEstimatorBase(
    Estimator[M],
    ScoringParams,
    InputParams,
    ModuleParams,
    TrainingParams,
    NumericsParams,
    ValidationParams,
    LaunchParams,
    StorageParams,
    CheckpointParams,
    TrackingParams,
    MLReadable[Any],
    MLWritable,
    Generic[M],
):
    """What all the estimators share."""

    _task: Task
    _model_class: type[M]
    _callers: dict[str, Any] = {}

    if not TYPE_CHECKING:
        # MLflow's autologging replaces `Estimator.fit`, to log what our listener logs already.
        fit = inspect.unwrap(Estimator.fit)

    def setParams(self, **params: Any) -> Self:
        """Sets several Params, by the names that the constructor has for them; `None` takes one back to its default.

        Raises:
            ConfigError: There is no such Param; the hint names the nearest.
            TypeError: A value has the wrong type.
        """
        check_param_names(self, params)
        self._set(**{name: value for name, value in params.items() if value is not None})
        for name, value in params.items():
            if value is None:
                self.clear(self.getParam(name))
        return self

    def copy(self, extra: ParamMap | None = None) -> Self:
        """Copies the estimator, with the Params in `extra` set.

        Fits of the copy belong where it was made: cross-validation copies its estimator in the
        caller's thread, and fits in others, which know nothing of the caller's MLflow run.
        """
        that = super().copy(extra)
        for values in (that._paramMap, that._defaultParamMap):
            values.update({param: _own(value) for param, value in values.items()})
        that._callers = {**self._callers, **callers()}
        return that

    def _setDefault(self, **values: Any) -> Self:
        """Sets defaults that are this estimator's own: who appends to one of them changes no other."""
        return super()._setDefault(**{name: _own(value) for name, value in values.items()})

    def _fit(self, dataset: DataFrame) -> M:
        if not hasattr(dataset, "sparkSession"):
            kind = f"{type(dataset).__module__.partition('.')[0]}'s {type(dataset).__name__}"
            raise ConfigError(f"fit takes a DataFrame of Spark's, and got {kind}", hint="spark.createDataFrame(it)")
        fit = Fit(estimator=self, spark=dataset.sparkSession, callers=self._callers)
        with FitReport(fit, rows_per_step=self.getBatchSize(), show=self.getProgress()) as report:
            started = time.perf_counter()
            request, frame, trial = self._prepared(dataset, report)
            report.prepared(frame.columns)
            prepared = time.perf_counter()
            results = _train(frame, trial, request, report)
            seconds = {"prepare": prepared - started, "job": time.perf_counter() - prepared}
            summary = _summarise(results, seconds)
            weights = next(payload for _, payload in results if payload)
            model = self._model(request, frame, trial, weights, summary, self._labels(dataset, trial.classes))
            report.finished(model, summary)
        return model

    def _prepared(self, dataset: DataFrame, report: FitReport) -> tuple[Request, Frame, Trial]:
        """Returns what the job needs, after every check that can be made before it."""
        request = translate(self, self._task)
        spark = dataset.sparkSession
        profile = gpu_profile(spark, request.launch.device, request.launch.world_size)
        check_cluster(spark, request.launch.world_size, profile, longest=request.launch.patience.start)
        request = replace(request, launch=replace(request.launch, profile=profile))
        if self.getPreflight() == "full":
            checkpoints = request.checkpoint.directory if request.checkpoint else None
            refuse(check_executors(spark, request.launch, checkpoints))
        frame = prepare(dataset, self._task, **request.columns)
        frame, trial = try_out(frame, request, report)
        check_result_size(spark, trial.state_bytes)
        check_thresholds(self, trial.classes)
        return request, frame, trial

    def _labels(self, dataset: DataFrame, classes: int | None) -> tuple[str, ...]:
        """Returns what the classes are called, `()` where the label column does not say it of every class."""
        known = () if classes is None else labels_of(dataset, self.getLabelCol())[:classes]
        return known if len(known) == classes else ()

    def _model(
        self,
        request: Request,
        frame: Frame,
        trial: Trial,
        weights: bytes,
        summary: TrainingSummary,
        labels: tuple[str, ...],
    ) -> M:
        preprocess = frame.columns.preprocess
        trained = TrainedModule(
            source=request.recipe.module,
            params=request.recipe.module_params,
            weights=weights,
            inputs=frame.columns.inputs,
            arguments=trial.arguments if preprocess else None,
            preprocess=None if preprocess is None else preprocess.function,
            returned=None if preprocess is None else preprocess.arguments,
            outputs=trial.outputs,
            task=self._task,
            labels=labels,
        )
        model = self._model_class()._with(trained, summary)
        model._resetUid(self.uid)
        return self._copyValues(model)

    def write(self) -> EstimatorWriter:
        """Returns a writer; `option("allowPickle", "true")` admits Params that have no import path."""
        return EstimatorWriter(self)

    def save(self, path: str) -> None:
        """Saves the estimator, a shortcut of `write().save(path)`."""
        self.write().save(path)

    @classmethod
    def read(cls) -> EstimatorReader[Any]:
        """Returns a reader; `option("allowPickle", "true")` admits pickled Params."""
        return EstimatorReader(cls)

    @classmethod
    def load(cls, path: str) -> Any:
        """Loads an estimator, a shortcut of `read().load(path)`."""
        return cls.read().load(path)


class TorchEstimator(TorchEstimatorBase[TorchModel], LabelColumns, OutputColumns):
    """Trains any PyTorch module on a DataFrame.

    `forward` gets one tensor per input column and returns a tensor, or a tuple or dict of tensors,
    with one row per input row. `loss(output, label)` returns one loss per row or their mean; with
    `labelCol=""` it is called as `loss(output)`. `transform` adds the output as `predictionCol`
    (a number or nested arrays of float), or several outputs under `outputCols`.

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before a job starts.
        RankError: From `fit`, when a rank fails.
    """

    _task = "generic"
    _model_class = TorchModel

    @keyword_only
    def __init__(
        self,
        *,
        module: Any = None,
        moduleParams: dict[str, Any] | None = None,
        featuresCol: str = "features",
        inputCols: list[str] | None = None,
        assembleInputs: bool = False,
        inputShapes: dict[str, list[int]] | None = None,
        inputLayouts: dict[str, str] | None = None,
        inputDtypes: dict[str, str] | None = None,
        maxLengths: dict[str, int] | None = None,
        padValues: dict[str, float] | None = None,
        preprocess: str | Callable[..., Any] | None = None,
        nullPolicy: str = "error",
        fillValue: float = 0.0,
        labelCol: str = "label",
        labelCols: list[str] | None = None,
        predictionCol: str = "prediction",
        outputCols: list[str] | None = None,
        weightCol: str | None = None,
        validationIndicatorCol: str | None = None,
        idCol: str | None = None,
        loss: str | Callable[..., Any] | None = None,
        lossParams: dict[str, Any] | None = None,
        trainingStep: str | Callable[..., Any] | None = None,
        optimizer: str | Callable[..., Any] = "AdamW",
        optimizerParams: dict[str, Any] | None = None,
        learningRate: float = 1e-3,
        parameterGroups: list[dict[str, Any]] | None = None,
        freeze: list[str] | None = None,
        scheduler: str | Callable[..., Any] | None = None,
        schedulerParams: dict[str, Any] | None = None,
        schedulerInterval: str = "epoch",
        warmupSteps: int | None = None,
        referenceBatchSize: int | None = None,
        batchSize: int = 256,
        accumulationSteps: int = 1,
        microBatchSize: int | None = None,
        gradientClipNorm: float | None = None,
        gradientClipValue: float | None = None,
        precision: str = "fp32",
        compile: bool = False,
        channelsLast: bool = False,
        syncBatchNorm: bool = False,
        emaDecay: float | None = None,
        nonFiniteLoss: str = "error",
        deterministic: bool = False,
        epochs: int = 1,
        validationInterval: int = 1,
        validationUnit: str = "epoch",
        metrics: dict[str, Any] | None = None,
        validationBatchSize: int | None = None,
        earlyStoppingPatience: int | None = None,
        callbacks: list[Any] | None = None,
        split: str = "key",
        storage: str = "memory",
        memoryBudget: int = 1024,
        shuffle: bool = True,
        shuffleBlock: int | None = None,
        seed: int = 0,
        strategy: str = "ddp",
        strategyParams: dict[str, Any] | None = None,
        numWorkers: int = 1,
        device: str = "auto",
        rendezvous: str = "auto",
        preflight: str = "basic",
        dryRun: str = "driver",
        checkpointDir: str | None = None,
        checkpointInterval: int = 1,
        checkpointUnit: str = "epoch",
        keepCheckpoints: int = 2,
        maxRestarts: int = 0,
        minWorkers: int | None = None,
        startTimeout: float = 3600.0,
        stallTimeout: float = 600.0,
        logLevel: str = "WARNING",
        handleInvalid: str = "error",
        predictBatchSize: int = 2048,
        predictPrecision: str = "fp32",
        predictCompile: bool = False,
        progress: bool = True,
        mlflowExperiment: str | None = None,
        mlflowRunName: str | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(**DEFAULTS)
        self._set(**given(self))


def _own(value: Any) -> Any:
    """Returns a list or a dict of its own with the same values; anything else as it is."""
    return copy.copy(value) if isinstance(value, list | dict) else value


def _train(frame: Frame, trial: Trial, request: Request, report: FitReport) -> Results:
    """Runs the barrier job; again, from its last checkpoint, where it has lost a rank."""
    job = TrainJob(
        columns=replace(frame.columns, classes=trial.classes),
        recipe=replace(request.recipe, metrics=trial.metrics),
        config=replace(request.config, unused_parameters=trial.unused_parameters),
        checkpoint=request.checkpoint,
        spare=frame.sample,
        storage=request.storage,
        # Those that stand still are to be told by name, before the others have waited for too long.
        collective_seconds=max(_COLLECTIVE_SECONDS, 2 * request.launch.patience.stall),
    )
    try:
        now, lost = request, []
        for restart in range(request.max_restarts):
            results = _unless_lost(partial(_run, frame, _restarted(job, restart), now, report), restart + 1, now)
            if results is not None:
                return results
            lost.append(now.launch.tag)
            now = _with_slots_left(frame.data.sparkSession, request, lost)
        return _run(frame, _restarted(job, request.max_restarts), now, report)
    finally:
        if request.checkpoint is not None:
            with suppress(Exception):  # if only ranks reach the directory, the claim ends by itself
                CheckpointStore(request.checkpoint.directory).release(request.checkpoint.owner)


def _restarted(job: TrainJob, times: int) -> TrainJob:
    return job if job.checkpoint is None else replace(job, checkpoint=replace(job.checkpoint, restart=times))


def _unless_lost(run: Callable[[], Results], number: int, request: Request) -> Results | None:
    """Returns what the ranks hand back; `None`, after a pause, where one of them was lost."""
    try:
        return run()
    except RankLostError as error:
        pause = min(_LONGEST_PAUSE, 2.0 ** (number - 1))
        origin = "its last checkpoint" if request.checkpoint else "the beginning"
        _LOG.warning("%s; restart %d of %d in %.0f s, from %s", error, number, request.max_restarts, pause, origin)
        time.sleep(pause)
    return None


def _with_slots_left(spark: SparkSession, request: Request, lost: list[str]) -> Request:
    """Returns the request for as many of its ranks as there are slots, once lost executors had time to come back.

    Args:
        spark: The session.
        request: As it was first.
        lost: Tags of the attempts that have failed.

    Raises:
        ClusterError: There are fewer slots than the fewest ranks it may go on with.
    """
    launch, least = replace(request.launch, tag=new_tag()), request.min_workers
    found = settled_slots(spark, launch.world_size, launch.profile, settle=_COMEBACK_SECONDS, lost=lost)
    if found is None or found >= launch.world_size:
        return replace(request, launch=launch)
    fewest = launch.world_size if least is None else least
    check_cluster(spark, fewest, launch.profile, longest=launch.patience.start)
    if found < fewest:
        _LOG.warning("the cluster has %d slots free: the restart waits for those of lost workers", found)
        return replace(request, launch=launch)
    _LOG.warning("the cluster has %d slots left: going on with as many workers instead of %d", found, launch.world_size)
    return replace(request, launch=replace(launch, world_size=found))


def _run(frame: Frame, job: TrainJob, request: Request, report: FitReport) -> Results:
    """Runs the barrier job; once more, split by place, if equal rows have crowded into one rank."""
    ranks = request.launch.world_size
    in_order = job.storage.kind != "memory"  # rows on disk are read in runs where they lie as they are trained
    if getattr(strategy_options(request.config), "folds", False):
        columns = replace(job.columns, validation="fold")
        job = replace(job, columns=columns, max_imbalance=None)
        data = split_into_folds(frame.data, ranks, in_order=in_order)
    elif request.split == "keep":
        job = replace(job, by_key=False, max_imbalance=None)
        data = keep(frame.data, ranks)
        with suppress(ChainError):
            return run_ranks(data, partial(train_partition, job=job), request.launch, report)
        _LOG.info("split='keep' behind coalesce() or union(): the rows go through a shuffle, each to its own partition")
        data = moved_as_they_are(data, ranks)
    else:
        data = split(frame.data, ranks, in_order=in_order)
    results = run_ranks(data, partial(train_partition, job=job), request.launch, report)
    if results[0][0].get("imbalanced"):
        data = split(frame.data, ranks, by_place=True, in_order=in_order)
        job = replace(job, max_imbalance=None)
        results = run_ranks(data, partial(train_partition, job=job), request.launch, report)
    return results


def _summarise(results: Results, seconds: dict[str, float]) -> TrainingSummary:
    ranks = [meta for meta, _ in results]
    best = next(rank for rank, (_, payload) in enumerate(results) if payload)
    main = ranks[best]
    joined = [main] if "epochs" in main else ranks  # independent ranks have a model each
    return TrainingSummary(
        history=main.pop("history"),
        rows=sum(meta["rows"] for meta in joined),
        validationRows=sum(meta["validation_rows"] for meta in joined),
        stepsPerEpoch=main.pop("steps_per_epoch"),
        numWorkers=len(ranks),
        fingerprint=main.pop("fingerprint"),
        seconds=seconds | {f"rank{best}.{name}": value for name, value in main["seconds"].items()},
        ranks=ranks,
        confusionMatrix=main.pop("confusion"),
        droppedRows=sum(meta["dropped"] for meta in joined),
    )
