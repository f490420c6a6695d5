"""`TorchCrossValidator`: Spark's `CrossValidator`, with the data set read once for all folds and models."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.ml import Model, Pipeline
from pyspark.ml.evaluation import Evaluator, JavaEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, CrossValidatorReader, _ValidatorSharedReadWrite
from pyspark.ml.util import DefaultParamsReader, MetaAlgorithmReadWrite
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.errors import ConfigError, Refusal, nearest, refuse
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.launching import can_hold
from sparktorch.ml.fit.translate import translate
from sparktorch.ml.fit.values import Values
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.tuning.folded_rows import MOST_BYTES, FoldedRows, NotInOnePass
from sparktorch.ml.tuning.metrics import metric_of
from sparktorch.ml.tuning.pipeline import PrefixFittedOnce
from sparktorch.ml.tuning.search import side_by_side
from sparktorch.ml.tuning.space import NO_CHECKPOINTS
from sparktorch.ml.tuning.tuned_model import discard
from sparktorch.spark.checks.preflight import settled_slots
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import frame_of_rows, inheriting, ml_session, to_vector
from sparktorch.spark.launch.gpus import gpu_profile
from sparktorch.spark.rdd import dataframe_of
from sparktorch.spark.session import is_connect, other_tasks, session_of, slots

__all__ = ["TorchCrossValidator", "weight_of"]

_LOG = logging.getLogger(__name__)
_PATIENCE = 30.0  # seconds without a metric, after which the ranks free their slots
_OUTPUTS = ("predictionCol", "probabilityCol", "rawPredictionCol")

_REFUSED = (
    *(
        Refusal(name, lambda p, name=name: p[name] is None, f"{name} is not set", f"set {name}", "ST-NOT-SET")  # type: ignore[misc]
        for name in ("estimator", "evaluator", "estimatorParamMaps")
    ),
    Refusal(
        "estimatorParamMaps",
        lambda p: not p["estimatorParamMaps"],
        "estimatorParamMaps is empty",
        "[{{}}] fits it as it is",
        "ST-NOT-SET",
    ),
    Refusal(
        "numFolds",
        lambda p: p["numFolds"] < 2,
        "numFolds is {p[numFolds]}, which leaves no rows to train on",
        "set 2 or more",
    ),
)


class TorchCrossValidator(CrossValidator):
    """Spark's `CrossValidator`, which reads the data set once for all folds and param maps.

    The Params, the folds and the model that `fit` returns are those of `CrossValidator`. Ranks hold the rows with their
    folds, in one barrier job: they train without a fold, score the fold, and the evaluator gets the scores. With
    `parallelism`, as many groups of ranks as there are slots for train side by side, and each holds all rows. Where one
    pass is impossible, `CrossValidator`'s own way is taken, and a line in the log (INFO) says why.

    With a `Pipeline`, the stages before the estimator whose Params are in no param map are fitted once per fold.

    Example:
        >>> from pyspark.ml.evaluation import RegressionEvaluator
        >>> from pyspark.ml.tuning import ParamGridBuilder
        >>> linear = {"in_features": 1, "out_features": 1}
        >>> regressor = TorchRegressor(module="torch.nn:Linear", moduleParams=linear, batchSize=5, progress=False)
        >>> rows = [([float(i % 7)], float(3 * (i % 7))) for i in range(60)]
        >>> data = spark.createDataFrame(rows, "features array<float>, label float")
        >>> validator = TorchCrossValidator(
        ...     estimator=regressor,
        ...     estimatorParamMaps=ParamGridBuilder().addGrid(regressor.learningRate, [0.1, 0.01]).build(),
        ...     evaluator=RegressionEvaluator(),
        ...     numFolds=2,
        ...     seed=1,
        ... )
        >>> len(validator.fit(data).avgMetrics)
        2

    Raises:
        ConfigError: From `fit`, before any job, if the search cannot work.
    """

    def _fit(self, dataset: DataFrame) -> CrossValidatorModel:
        self._check()
        evaluator = self.getEvaluator()
        if isinstance(evaluator, JavaEvaluator) and not is_connect(session_of(dataset)):
            evaluator._transfer_params_to_java()  # refuses a wrong value, as that of metricName
        dataset = dataframe_of(dataset, "fit")
        in_pipeline = isinstance(self.getEstimator(), Pipeline)
        try:
            return self._fit_pipeline(dataset) if in_pipeline else self._in_one_pass(dataset)
        except NotInOnePass as reason:
            why = str(reason)
        except AnalysisException as error:
            if in_pipeline or "UNRESOLVED_COLUMN" not in str(error):
                raise
            why = "the evaluator reads columns that its Params do not name"
        _LOG.info("folds are read one by one: %s", why)
        return super()._fit(dataset)

    def _in_one_pass(self, dataset: DataFrame) -> CrossValidatorModel:
        """Trains and scores all folds and param maps on rows that ranks hold."""
        evaluator, folds, maps = self.getEvaluator(), self.getNumFolds(), self.getEstimatorParamMaps()
        estimators = [self.getEstimator().copy(params) for params in maps]
        carried = self._carried(estimators, dataset)
        models: list[list[Any]] = [[None] * len(maps) for _ in range(folds)]
        count, weight = folds * len(maps) + 1, weight_of(evaluator, carried)
        with ExitStack() as stack:
            made = partial(FoldedRows, self, estimators[0], dataset, carried=carried, weight=weight, contents=set())
            groups = [
                stack.enter_context(made()) for _ in range(self._groups(estimators[0], count - 1, dataset.sparkSession))
            ]
            metrics = stack.enter_context(_Metrics(evaluator, groups, parallelism=self.getParallelism(), weight=weight))
            unreturned = stack.enter_context(ExitStack())

            def fit(rows: FoldedRows, fold: int, index: int) -> None:
                title = f"fit {fold * len(maps) + index + 1} of {count}"
                model = rows.fit(estimators[index], without=fold, title=title)
                models[fold][index] = model if self.getCollectSubModels() else None
                with ExitStack() as scored_once:
                    (unreturned if self.getCollectSubModels() else scored_once).callback(discard, model)
                    shown = model.copy(maps[index])
                    metrics.add(fold, index, shown, rows.score(shown, fold, _results_for(evaluator, shown)))

            left = product(range(folds), range(len(maps)))

            def work(group: FoldedRows) -> None:
                for fold, index in left:
                    fit(group, fold, index)
                if group is not groups[0]:
                    group.close()

            if len(groups) == 1:
                work(groups[0])
            else:
                _LOG.info("%d groups of ranks train side by side, and each holds all rows", len(groups))
                side_by_side(groups, work, lambda: list(left))
            means, deviations = self._gen_avg_and_std_metrics(metrics.all(folds, len(maps)))
            best = int(np.argmax(means) if evaluator.isLargerBetter() else np.argmin(means))
            model = groups[0].fit(estimators[best], without=None, title=f"fit {count} of {count}")
            unreturned.pop_all()
        kept = cast("list[list[Model]]", models) if self.getCollectSubModels() else None
        return self._copyValues(CrossValidatorModel(model, means, kept, deviations))

    def _groups(self, estimator: Any, fits: int, spark: SparkSession) -> int:
        """Returns how many groups of ranks train side by side: `parallelism`, if there are free slots now."""
        most = min(self.getParallelism(), fits)
        if most == 1:
            return 1
        launch = translate(estimator, estimator._task).launch
        profile = gpu_profile(spark, launch.device, launch.world_size)
        found = settled_slots(spark, most * launch.world_size, profile, settle=0.0)
        free = (found or 0) - other_tasks(spark, launch.tag, (), all_jobs=True, gpus=profile is not None)
        return max(1, min(most, free // launch.world_size))

    def _check(self) -> None:
        """Refuses a search that cannot work."""
        refuse(_REFUSED, Values(self))
        estimator: Any = self.getEstimator()
        nested = MetaAlgorithmReadWrite.getAllNestedStages(estimator)
        known, names = {stage.uid for stage in nested}, [param.name for stage in nested for param in stage.params]
        maps = self.getEstimatorParamMaps()
        given = [param for params in maps for param in params]
        strange = next((param for param in given if getattr(param, "parent", "") not in known), None)
        if strange is not None:
            name, parent = getattr(strange, "name", str(strange)), getattr(strange, "parent", "a str")
            raise ConfigError(
                f"a param map sets {name!r} of {parent}, which is no stage of the estimator",
                hint=f"build the grid with the Params of this estimator; {nearest(name, names)}",
                param=name,
            )
        stages = estimator.getStages() if isinstance(estimator, Pipeline) else [estimator]
        for stage in [stage for stage in stages if isinstance(stage, TorchEstimatorBase)]:
            for params in maps:
                fitted = stage.copy(params)
                request = translate(fitted, stage._task)
                refuse(NO_CHECKPOINTS, Values(fitted))
                if request.columns["groups"] is not None and not self.getFoldCol():
                    raise ConfigError(
                        "foldCol is not set, and folds drawn row by row would divide the groups",
                        hint="name a column of folds that is the same in all rows of a group, as by its hash",
                        param="foldCol",
                    )

    def _carried(self, estimators: list[Any], dataset: DataFrame) -> tuple[str, ...]:
        """Returns the numeric columns that the evaluator reads beside the predictions.

        A `NotInOnePass` says that one pass is impossible.
        """
        if not isinstance(self.getEstimator(), TorchEstimatorBase) or estimators[0]._learns:
            name = type(self.getEstimator()).__name__
            raise NotInOnePass(f"{name} learns of the rows that train, of each fold anew, or is of another package")
        requests = [translate(estimator, estimator._task) for estimator in estimators]
        evaluator, names = self.getEvaluator(), ColumnNames.of(dataset)
        read = _columns_of(evaluator)
        made = [{one.getOrDefault(name) for name in _OUTPUTS if one.hasParam(name)} - {""} for one in estimators]
        carried = [name for name in dict.fromkeys(read) if any(name not in outputs for outputs in made)]
        strange = [one for one in carried if not names.called(one) or not isinstance(names.type_of(one), T.NumericType)]
        why = ""
        if any(request.rows != requests[0].rows for request in requests):
            why = "the param maps need different rows"
        elif not can_hold(requests[0], dataset.sparkSession):
            why = "ranks cannot hold rows"
        elif requests[0].job.storage.kind != "memory" or requests[0].columns["groups"] is not None:
            why = "storage is not 'memory', or rows have groups"
        elif any(names.called(name) for name in set().union(*made)):  # which `transform` refuses
            why = "the DataFrame already has an output column of the model"
        elif not any(outputs.intersection(read) for outputs in made):
            why = f"{type(evaluator).__name__} names no output column of the model"
        elif strange:
            why = f"the evaluator reads {strange[0]!r}, which is no number, and not every model makes it"
        if why:
            raise NotInOnePass(why)
        return tuple(carried)

    def _fit_pipeline(self, dataset: DataFrame) -> CrossValidatorModel:
        """Lets Spark's `CrossValidator` fit a pipeline whose first stages are fitted once per fold."""
        pipeline: Any = self.getEstimator()
        ours = [place for place, stage in enumerate(pipeline.getStages()) if isinstance(stage, TorchEstimatorBase)]
        if not ours:
            return super()._fit(dataset)
        inner = CrossValidator.copy(self)
        inner._set(estimator=PrefixFittedOnce(pipeline, ours[0]))
        model = CrossValidator._fit(inner, dataset)
        model._set(estimator=pipeline)
        return model

    @classmethod
    def read(cls) -> CrossValidatorReader:
        """Returns a reader."""
        return _Reader(cls)


class _Reader(CrossValidatorReader):
    def load(self, path: str) -> TorchCrossValidator:
        """Loads what `write` has saved."""
        session = ml_session(self.sparkSession)
        metadata = DefaultParamsReader.loadMetadata(path, session)
        # pyspark takes classes outside of its own package for those of Java's writers.
        known = {**metadata, "class": "pyspark.ml.tuning.CrossValidator"}
        _, estimator, evaluator, maps = _ValidatorSharedReadWrite.load(path, session, known)
        found = TorchCrossValidator(estimator=estimator, estimatorParamMaps=maps, evaluator=evaluator)
        found._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(found, metadata, skipParams=["estimatorParamMaps"])
        return found


class _Metrics:
    """Metrics: computed at once, or by the evaluator, in threads, whose jobs may have to wait for the ranks' slots."""

    def __init__(
        self, evaluator: Evaluator, groups: Sequence[FoldedRows], *, parallelism: int, weight: str | None
    ) -> None:
        """Takes at most `parallelism` metrics at a time; `weight` is what `weight_of` says."""
        self._groups, self._evaluator, self._spark = groups, evaluator, groups[0].dataset.sparkSession
        if weight is not None:
            self._evaluator = evaluator.copy({evaluator.getParam("weightCol"): weight})
        self._pool = ThreadPoolExecutor(parallelism, "sparktorch-metrics")
        self._found: dict[tuple[int, int], Future[float]] = {}
        self._bytes: dict[Future[float], int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> _Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, fold: int, index: int, model: TorchModelBase, table: pa.Table) -> None:
        """Begins to compute a metric of scored rows, if it is not known at once; raises the error of an earlier one.

        Waits if many are left.
        """
        value = metric_of(self._evaluator, table)
        if value is not None:
            known: Future[float] = Future()
            known.set_result(value)
            self._found[fold, index] = known
            return
        kinds, outputs = model._fields()
        columns = [_column(name, outputs.get(name), kinds, model) for name in table.column_names]
        compute = partial(self._evaluate, table, columns)
        with self._lock:
            future = self._found[fold, index] = self._pool.submit(inheriting(self._spark, compute))
            self._bytes[future] = table.nbytes
            self._settle(MOST_BYTES)

    def all(self, folds: int, models: int) -> list[list[float]]:
        """Waits for the metrics, by fold and model; frees the slots of the ranks if there are no others."""
        self._settle(-1)
        return [[self._found[fold, index].result() for index in range(models)] for fold in range(folds)]

    def _evaluate(self, table: pa.Table, columns: Sequence[Any]) -> float:
        return self._evaluator.evaluate(frame_of_rows(self._spark, table).select(*columns))

    def _settle(self, most: int) -> None:
        """Waits until the scores of missing metrics take at most that many bytes, or, below 0, until there are none."""
        count, held = slots(self._spark), sum(group.slots_held for group in self._groups)
        patience: float | None = _PATIENCE if count is None or count > held else 0.0
        while True:
            for done in [future for future in self._bytes if future.done()]:
                del self._bytes[done]
                done.result()
            if sum(self._bytes.values()) <= most or not self._bytes:
                return
            if not wait(self._bytes, timeout=patience, return_when=FIRST_COMPLETED).done:
                _LOG.info("the evaluator's jobs find no slot: the ranks free theirs, and read the rows again later")
                for group in self._groups:
                    group.let_go()
                patience = None


def _column(name: str, field: str | None, kinds: Mapping[str, str], model: TorchModelBase) -> Any:
    column = F.col(f"`{name}`")
    if field is None:
        return column
    kind = kinds[field]
    return (to_vector(column) if kind == "vector" else column).alias(name, metadata=model._attribute(field, kind))


def _columns_of(evaluator: Evaluator) -> list[str]:
    """Returns the columns that an evaluator's Params name."""
    unread = "probabilityCol" if _counts(evaluator) else ""
    named = [param for param in evaluator.params if param.name.endswith("Col") and param.name != unread]
    return [name for param in named if evaluator.isDefined(param) and (name := evaluator.getOrDefault(param))]


def _results_for(evaluator: Evaluator, model: TorchModelBase) -> dict[str, str]:
    """Returns the results of the scorer that an evaluator reads, with the name of the column of each."""
    read = _columns_of(evaluator)
    return {field: name for name, field in model._fields()[1].items() if name in read}


def weight_of(evaluator: Evaluator, carried: Sequence[str]) -> str | None:
    """Returns the column by whose sums an evaluator takes equal rows as one; `None` if it needs each row."""
    if not _counts(evaluator):
        return None
    if not evaluator.isDefined("weightCol") or not evaluator.getOrDefault("weightCol"):
        return f"{evaluator.uid}_weight"
    weight: str = evaluator.getOrDefault("weightCol")
    return weight if weight in carried and weight != evaluator.getOrDefault("labelCol") else None


def _counts(evaluator: Evaluator) -> bool:
    """Whether an evaluator reads no more than a confusion matrix."""
    return type(evaluator) is MulticlassClassificationEvaluator and evaluator.getOrDefault("metricName") != "logLoss"
