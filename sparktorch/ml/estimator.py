"""The base class of the estimators, and `TorchEstimator`."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame

from sparktorch.base.config import Task, above
from sparktorch.base.state_dict import unpacked_weights
from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.errors import ConfigError, counted, shortens
from sparktorch.ml.fit.attempts import train_with_restarts
from sparktorch.ml.fit.checks import check_new_columns, check_param_names, naming_params
from sparktorch.ml.fit.first_row_trial import plan_of
from sparktorch.ml.fit.listeners import Fit, FitReport, callers
from sparktorch.ml.fit.multiple import fit_multiple
from sparktorch.ml.fit.prepared_data import FreshData, PreparedData, Source
from sparktorch.ml.fit.summary import TrainingSummary
from sparktorch.ml.fit.task_training import TaskTraining
from sparktorch.ml.model import TorchModel, TorchModelBase
from sparktorch.ml.params.declare import separate_copy
from sparktorch.ml.params.mixins import EstimatorParams, GenericParams
from sparktorch.ml.persistence import EstimatorReader, EstimatorWriter
from sparktorch.ml.scoring.column_metadata import labels_of
from sparktorch.ml.scoring.html import Shown
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.rdd import dataframe_of
from sparktorch.train.plan.table import Plan
from sparktorch.train.recipe.dry_run import DryRunResult
from sparktorch.worker import TrainJob

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from typing_extensions import Self

__all__ = ["TorchEstimator", "TorchEstimatorBase"]

_LOG = logging.getLogger(__name__)
_FEW_STEPS = 300  # Hardly a module learns in fewer steps.

M = TypeVar("M", bound=TorchModelBase)


class TorchEstimatorBase(Shown, Estimator[M], EstimatorParams, MLReadable[Any], MLWritable, Generic[M]):
    """Base class of all estimators."""

    _task: Task
    _model_class: type[M]
    _callers: dict[str, Any] = {}

    if not TYPE_CHECKING:

        @shortens
        def fit(self, dataset: DataFrame | PreparedData, params: Any = None) -> Any:
            """Fits a model to a dataset, or one for each of several settings of Params; see `Estimator.fit`."""
            if isinstance(params, DataFrame):
                hint = "validationIndicatorCol: train.withColumn('held_out', lit(False)).unionByName(validation...)"
                raise ConfigError("rows for validation are marked in one DataFrame", hint=hint, param="dataset")
            # Undoes the patch of MLflow's autologging: our listener logs the fit already.
            return inspect.unwrap(Estimator.fit)(self, dataset, params)

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
        copied = super().copy(extra)
        for values in (copied._paramMap, copied._defaultParamMap):
            values.update({param: separate_copy(value) for param, value in values.items()})
        copied._callers = {**self._callers, **callers()}
        return copied

    def _setDefault(self, **values: Any) -> Self:
        """Sets copies of lists and dicts as defaults: who appends to one changes no other estimator."""
        return super()._setDefault(**{name: separate_copy(value) for name, value in values.items()})

    def _fit(self, dataset: DataFrame | PreparedData) -> M:
        if isinstance(dataset, PreparedData):
            return self._fit_on(dataset)
        began = time.perf_counter()
        estimator, rows = self._learn_from(_checked(dataset))
        return estimator._fit_on(FreshData(rows, began))

    def _fit_on(self, source: Source, judge: Callable[[dict[str, Any]], bool] | None = None) -> M:
        """Fits on the rows of a source; `judge` may end the training after an epoch, if the rows are prepared."""
        estimator, spark = self.completed(), source.dataset.sparkSession
        fit = Fit(estimator=estimator, spark=spark, callers=estimator._callers, kind=type(estimator).__name__)
        with FitReport(fit, title=source.title, stays=source.bar_stays, judge=judge) as report:
            started = getattr(source, "began", None) or time.perf_counter()
            with naming_params(estimator):
                request, data, trial = source.prepared(estimator, estimator._task, report)
            check_new_columns(estimator, source.dataset, len(trial.outputs))
            columns = request.job.columns
            report.prepared(columns)
            prepared = time.perf_counter()
            run = partial(source.attempt, data, report=report)
            results = train_with_restarts(spark, request, run, report.attempts)
            seconds = {"prepare": prepared - started, "job": time.perf_counter() - prepared}
            config, chosen = request.job.config, estimator._chosen()
            summary = TrainingSummary.of(results, seconds, report.attempts.records, config=config, chosen=chosen)
            estimator._warn_of_few_steps(summary)
            if columns.validation is not None and not any(meta["validation_rows"] for meta, _ in results):
                message = "column %r marks no row for validation: there are no metrics of validation"
                _LOG.warning(message, columns.validation)
            # Ranks that do not send the weights have an empty payload.
            main, weights = next((meta, unpacked_weights(payload)) for meta, payload in results if payload)
            labels = estimator._labels(source.dataset, trial.classes)
            model = estimator._model(request.job, trial, weights, summary, labels, main.pop("seed"))
            report.finished(model, summary)
        return model

    def prepare(self, dataset: DataFrame, *, idleTimeout: float = 600.0) -> PreparedData:
        """Lets ranks read a DataFrame once for several fits: `estimator.fit(prepared, params)`.

        The first fit reads the rows. Use it as a context manager, or call `close`.

        Args:
            dataset: The rows to train on.
            idleTimeout: Seconds without a fit after which the ranks end and free their slots.

        Raises:
            ConfigError: A Param is invalid, or ranks cannot hold rows: executors do not reach this process.
        """
        above("idleTimeout", idleTimeout, 0)
        estimator, rows = self._learn_from(_checked(dataset))
        return PreparedData(estimator, self._task, rows, idle_timeout=idleTimeout, gives_way=True)

    def plan(self, dataset: DataFrame, *, memory: float | None = None) -> Plan:
        """Returns the memory that each strategy takes of a worker, and the bytes sent in a step. Print it for a table.

        It trains nothing: it reads the first row, and needs as much memory on the driver as a training with one worker
        and a few rows.

        Args:
            dataset: The rows to train on.
            memory: MB that a worker has: those of its device or, on CPUs, its share of the host's.

        Raises:
            ConfigError: A Param is invalid, or `memory` is no positive number.
            ModuleError: The module cannot be built, or does not fit the columns.
        """
        estimator, rows = self._learn_from(_checked(dataset, "plan"))
        return plan_of(estimator.completed(), self._task, rows, memory)

    def fitMultiple(self, dataset: DataFrame | PreparedData, paramMaps: Sequence[ParamMap]) -> Iterator[tuple[int, M]]:
        """Trains a model for each of several settings of Params, and yields each with its index once it is trained.

        Ranks read the rows once for all settings that need the same rows, and train them one after another in one
        barrier job. It starts with the first call of `next`, and does not wait for its models to be taken: who scores
        with one of them waits until the job ends if it holds all slots. The iterator may be used by several threads.
        `CrossValidator` and `TrainValidationSplit` use it.

        Args:
            dataset: The rows to train on.
            paramMaps: The settings.

        Raises:
            ConfigError: A setting is invalid, or several have the same `checkpointDir`. `next` raises what a fit
                raises, for the setting whose turn it is; the others train on.
        """
        estimators = [self.copy(params) for params in paramMaps]
        return fit_multiple(estimators, dataset if isinstance(dataset, PreparedData) else _checked(dataset))

    def completed(self) -> Self:
        """Returns the estimator with the Params that follow from other Params; few estimators have any."""
        return self

    @property
    def _learns(self) -> bool:
        """Whether a fit learns statistics of the rows before it trains on them."""
        return False

    @property
    def _holds_out(self) -> bool:
        """Whether a fit marks rows that it holds out of the training."""
        return False

    def _holding_out(self) -> Self:
        """Returns a copy that holds out rows whatever its epochs are, if the estimator does."""
        return self.copy()

    def _knowing(self, other: Any) -> Self:
        """Returns the estimator with the statistics that another estimator has learned of the same rows."""
        return self

    def _differing(self, other: Any) -> list[str]:
        """Returns the Params by which this estimator learns other statistics of rows than another one."""
        return []

    def _search_space(self) -> dict[str, list[Any]]:
        """Returns the choices of a TorchTuner without a space, by name; the first one is `None`, the default.

        Estimators for one task have some.
        """
        return {}

    def _chosen(self) -> dict[str, Any]:
        """Returns the fields of the summary for the settings that the estimator has chosen itself."""
        return {}

    def _learn_from(self, dataset: DataFrame) -> tuple[Self, DataFrame]:
        """Returns the estimator with the statistics that it learns of rows, and the rows as it trains on them."""
        return self, dataset

    def _task_training(self) -> TaskTraining:
        """Returns what the training has that no Param says, in estimators of a kind of task."""
        return TaskTraining()

    def _warn_of_few_steps(self, summary: TrainingSummary) -> None:
        """Warns of a training that has ended after a few steps because nobody has said how long it takes."""
        steps = summary.totalIterations
        if steps < _FEW_STEPS and not self.isSet("epochs") and not summary.settings:
            message = (
                "the fit took %s in %s of batchSize %d, and epochs is not set: set it, so that the training takes some "
                "hundred steps; with validationIndicatorCol and earlyStoppingPatience it ends by itself"
            )
            epochs = counted(len(summary.history), "epoch", "epochs")
            _LOG.warning(message, counted(steps, "step", "steps"), epochs, self.getBatchSize())

    def _labels(self, dataset: DataFrame, classes: int | None) -> tuple[str, ...]:
        """Returns the label of each class, or `()` if the column metadata does not have all of them."""
        labels = () if classes is None else labels_of(dataset, self.getLabelCol())[:classes]
        return labels if len(labels) == classes else ()

    def _model(
        self,
        job: TrainJob,
        trial: DryRunResult,
        weights: bytes | WeightsFolder,
        summary: TrainingSummary,
        labels: tuple[str, ...],
        seed: int,
    ) -> M:
        preprocess = job.columns.preprocess
        trained = TrainedModule(
            source=job.recipe.module,
            params=job.recipe.module_params,
            weights=weights,
            inputs=job.columns.inputs,
            arguments=trial.arguments if preprocess else None,
            preprocess=None if preprocess is None else preprocess.function,
            returned=None if preprocess is None else preprocess.arguments,
            outputs=trial.outputs,
            task=self._task,
            labels=labels,
            seed=seed,
        )
        model = self._model_class()._with(trained, summary)
        model._resetUid(self.uid)
        return self._copyValues(model)

    def write(self) -> EstimatorWriter:
        """Returns a writer; `option("allowPickle", "true")` allows Params without an import path."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> EstimatorReader[Any]:
        """Returns a reader; `option("allowPickle", "true")` allows pickled Params."""
        return EstimatorReader(cls)


def _checked(dataset: Any, caller: str = "fit") -> DataFrame:
    """Returns the dataset, if it is a DataFrame, or that of an RDD; refuses all else, and streams."""
    rows = dataframe_of(dataset, caller)
    if rows.isStreaming:
        raise ConfigError(
            f"{caller} takes all rows at once, and the DataFrame is a stream, which has no end",
            hint="read the same rows by spark.read, or fit on those of a batch, by foreachBatch",
            param="dataset",
            code="ST-STREAM",
        )
    return rows


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
