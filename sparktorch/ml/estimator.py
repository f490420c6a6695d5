"""The base class of the estimators, and `TorchEstimator`."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame

from sparktorch.base.config import Task
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.attempts import train_with_restarts
from sparktorch.ml.fit.checks import check_param_names, check_thresholds
from sparktorch.ml.fit.first_row_trial import try_out
from sparktorch.ml.fit.listeners import Fit, FitReport, callers
from sparktorch.ml.fit.translate import Request, translate
from sparktorch.ml.model import TorchModel, TorchModelBase
from sparktorch.ml.params.declare import own
from sparktorch.ml.params.mixins import EstimatorParams, GenericParams
from sparktorch.ml.persistence import EstimatorReader, EstimatorWriter
from sparktorch.ml.scoring.column_metadata import labels_of
from sparktorch.ml.summary import TrainingSummary
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.checks.check_result import refuse
from sparktorch.spark.checks.doctor import check_executors
from sparktorch.spark.checks.preflight import check_cluster, check_result_size
from sparktorch.spark.frame.prepare import Frame, prepare
from sparktorch.spark.launch.gpus import gpu_profile
from sparktorch.train.recipe.dry_run import DryRunResult

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from typing_extensions import Self

__all__ = ["TorchEstimator", "TorchEstimatorBase"]

M = TypeVar("M", bound=TorchModelBase)


class TorchEstimatorBase(Estimator[M], EstimatorParams, MLReadable[Any], MLWritable, Generic[M]):
    """Base class of all estimators."""

    _task: Task
    _model_class: type[M]
    _callers: dict[str, Any] = {}

    if not TYPE_CHECKING:
        # Undoes the patch of MLflow's autologging: our listener logs the fit already.
        fit = inspect.unwrap(Estimator.fit)

    def setParams(self, **params: Any) -> Self:
        """Sets several Params by name; `None` resets a Param to its default.

        Raises:
            ConfigError: A Param is unknown; the hint suggests the nearest name.
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

        The copy remembers the MLflow run that is active in this thread. Cross-validation copies its
        estimator in the caller's thread, and fits the copies in threads without an active run.
        """
        that = super().copy(extra)
        for values in (that._paramMap, that._defaultParamMap):
            values.update({param: own(value) for param, value in values.items()})
        that._callers = {**self._callers, **callers()}
        return that

    def _setDefault(self, **values: Any) -> Self:
        """Sets copies of lists and dicts as defaults: who appends to one changes no other estimator."""
        return super()._setDefault(**{name: own(value) for name, value in values.items()})

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
            results = train_with_restarts(frame, trial, request, report)
            seconds = {"prepare": prepared - started, "job": time.perf_counter() - prepared}
            summary = TrainingSummary.of(results, seconds)
            weights = next(payload for _, payload in results if payload)
            model = self._model(request, frame, trial, weights, summary, self._labels(dataset, trial.classes))
            report.finished(model, summary)
        return model

    def _prepared(self, dataset: DataFrame, report: FitReport) -> tuple[Request, Frame, DryRunResult]:
        """Runs all checks that need no training job; returns what the job needs."""
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
        """Returns the label of each class, or `()` if the column metadata does not have all of them."""
        known = () if classes is None else labels_of(dataset, self.getLabelCol())[:classes]
        return known if len(known) == classes else ()

    def _model(
        self,
        request: Request,
        frame: Frame,
        trial: DryRunResult,
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
        """Returns a writer; `option("allowPickle", "true")` allows Params without an import path."""
        return EstimatorWriter(self)

    def save(self, path: str) -> None:
        """Saves the estimator; a shortcut for `write().save(path)`."""
        self.write().save(path)

    @classmethod
    def read(cls) -> EstimatorReader[Any]:
        """Returns a reader; `option("allowPickle", "true")` allows pickled Params."""
        return EstimatorReader(cls)

    @classmethod
    def load(cls, path: str) -> Any:
        """Loads an estimator; a shortcut for `read().load(path)`."""
        return cls.read().load(path)


class TorchEstimator(TorchEstimatorBase[TorchModel], GenericParams):
    """Trains any PyTorch module on a DataFrame.

    `forward` gets one tensor per input column and returns a tensor, or a tuple or dict of tensors,
    with one row per input row. `loss(output, label)` returns one loss per row or their mean; with
    `labelCol=""` it is called as `loss(output)`. `transform` adds the output as `predictionCol`
    (a number or nested arrays of float), or several outputs under `outputCols`.

    Example:
        >>> import torch
        >>> def absolute(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        ...     return (output.squeeze(1) - label).abs()  # one loss per row
        >>> rows = [([float(i)], float(3 * i)) for i in range(20)]
        >>> data = spark.createDataFrame(rows, "features array<float>, label float")
        >>> estimator = TorchEstimator(
        ...     module="torch.nn:Linear",
        ...     moduleParams={"in_features": 1, "out_features": 1},
        ...     loss=absolute,
        ...     batchSize=5,
        ...     epochs=3,
        ...     progress=False,
        ... )
        >>> model = estimator.fit(data)
        >>> len(model.summary.history)
        3

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before a job starts.
        RankError: From `fit`, when a rank fails.
    """

    _task = "generic"
    _model_class = TorchModel
