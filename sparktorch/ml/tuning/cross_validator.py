"""`TorchCrossValidator`: Spark's `CrossValidator`, with the data set read once for all folds and models."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pyspark.errors import AnalysisException
from pyspark.ml import Estimator, Model, Pipeline, PipelineModel
from pyspark.ml.evaluation import JavaEvaluator
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, CrossValidatorReader, _ValidatorSharedReadWrite
from pyspark.ml.util import DefaultParamsReader, MetaAlgorithmReadWrite
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from sparktorch.errors import ConfigError, nearest
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.prepared_data import obstacle
from sparktorch.ml.fit.translate import Request, translate
from sparktorch.ml.fit.values import Values
from sparktorch.ml.tuning.folded_rows import FoldedRows, NotInOnePass
from sparktorch.ml.tuning.metrics import FoldMetrics, columns_of, results_for, weight_of
from sparktorch.ml.tuning.search import side_by_side
from sparktorch.ml.tuning.space import check_no_checkpoints
from sparktorch.ml.tuning.tuned_model import discard
from sparktorch.spark.checks.preflight import settled_slots
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import ml_session
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.spark.launch.gpus import gpu_profile
from sparktorch.spark.rdd import dataframe_of
from sparktorch.spark.session import is_connect, other_tasks, session_of
from sparktorch.worker import TrainJob

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap

__all__ = ["TorchCrossValidator"]

_LOG = logging.getLogger(__name__)
_OUTPUTS = ("predictionCol", "probabilityCol", "rawPredictionCol")


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
        requests = self._check()
        evaluator = self.getEvaluator()
        if isinstance(evaluator, JavaEvaluator) and not is_connect(session_of(dataset)):
            # Java's evaluator refuses a wrong value, such as an unknown metricName, before any training.
            evaluator._transfer_params_to_java()
        dataset = dataframe_of(dataset, "fit")
        in_pipeline = isinstance(self.getEstimator(), Pipeline)
        try:
            return self._fit_pipeline(dataset) if in_pipeline else self._in_one_pass(dataset, requests)
        except NotInOnePass as reason:
            why = str(reason)
        except AnalysisException as error:
            if in_pipeline or "UNRESOLVED_COLUMN" not in str(error):
                raise
            # Some evaluators read columns that no Param names, and the scores of one pass do not have them.
            why = "the evaluator reads columns that its Params do not name"
        _LOG.info("folds are read one by one: %s", why)
        return super()._fit(dataset)

    def _in_one_pass(self, dataset: DataFrame, requests: list[Request[TrainJob]]) -> CrossValidatorModel:
        """Trains and scores all folds and param maps on rows that ranks hold."""
        evaluator, folds, maps = self.getEvaluator(), self.getNumFolds(), self.getEstimatorParamMaps()
        estimators = [self.getEstimator().copy(params) for params in maps]
        carried = self._carried(estimators, requests, dataset)
        models: list[list[Any]] = [[None] * len(maps) for _ in range(folds)]
        fits, weight = folds * len(maps) + 1, weight_of(evaluator, carried)
        lock, over = Lock(), Event()
        ended: list[FoldedRows] = []  # Each group is appended when it has no fit left.
        with ExitStack() as stack:
            # This stack discards the models that a failed search does not return; `over` is set before it closes.
            unreturned = stack.enter_context(ExitStack())
            stack.callback(over.set)
            # All groups share one set of contents, so that they notice if they have read other rows than each other.
            rows_of_group = partial(
                FoldedRows, self, estimators[0], dataset, carried=carried, weight=weight, contents=set()
            )
            group_count = self._group_count(requests[0].launch, fits - 1, dataset.sparkSession)
            groups = [stack.enter_context(rows_of_group()) for _ in range(group_count)]
            metrics = stack.enter_context(
                FoldMetrics(evaluator, groups, parallelism=self.getParallelism(), weight=weight)
            )

            def fit(rows: FoldedRows, fold: int, index: int) -> None:
                title = f"fit {fold * len(maps) + index + 1} of {fits}"
                model = rows.fit(estimators[index], without=fold, title=title)
                models[fold][index] = model if self.getCollectSubModels() else None
                with ExitStack() as scored_once:
                    owner = unreturned if self.getCollectSubModels() else scored_once
                    owner.callback(discard, model)
                    # After an error in another thread, the stack was closed before this model was on it.
                    if over.is_set():
                        unreturned.close()
                    scorer = model.copy(maps[index])
                    metrics.add(fold, index, scorer, rows.score(scorer, fold, results_for(evaluator, scorer)))

            # All groups take from one iterator: who is done with a fit takes the next one.
            remaining = product(range(folds), range(len(maps)))

            def work(group: FoldedRows) -> None:
                for fold, index in remaining:
                    fit(group, fold, index)
                with lock:
                    ended.append(group)
                    is_last = len(ended) == len(groups)
                # The last group keeps its rows for the fit of the best Params on all of them.
                if not is_last:
                    group.close()

            def stop() -> None:
                """Leaves no fit to the groups."""
                for _ in remaining:
                    pass

            if len(groups) == 1:
                work(groups[0])
            else:
                _LOG.info("%d groups of ranks train side by side, and each holds all rows", len(groups))
                side_by_side(groups, work, stop)
            means, deviations = self._gen_avg_and_std_metrics(metrics.all(folds, len(maps)))
            best = int(np.argmax(means) if evaluator.isLargerBetter() else np.argmin(means))
            model = ended[-1].fit(estimators[best], without=None, title=f"fit {fits} of {fits}")
            unreturned.pop_all()  # The search has succeeded: it returns these models, and discards none.
        sub_models = cast("list[list[Model]]", models) if self.getCollectSubModels() else None
        return self._copyValues(CrossValidatorModel(model, means, sub_models, deviations))

    def _group_count(self, launch: Launch, fits: int, spark: SparkSession) -> int:
        """Returns how many groups of ranks train side by side: `parallelism`, if there are free slots now."""
        most = min(self.getParallelism(), fits)
        if most == 1:
            return 1
        profile = gpu_profile(spark, launch.device, launch.world_size)
        slots = settled_slots(spark, most * launch.world_size, profile, settle=0.0)
        free = (slots or 0) - other_tasks(spark, launch.tag, (), all_jobs=True, gpus=profile is not None)
        return max(1, min(most, free // launch.world_size))

    def _check(self) -> list[Request[TrainJob]]:
        """Refuses a search that cannot work; returns what our estimators ask for with each param map."""
        _check_params(Values(self))
        estimator: Any = self.getEstimator()
        nested = MetaAlgorithmReadWrite.getAllNestedStages(estimator)
        uids = {stage.uid for stage in nested}
        maps = self.getEstimatorParamMaps()
        keys = [param for params in maps for param in params]
        strange = next((param for param in keys if getattr(param, "parent", "") not in uids), None)
        if strange is not None:
            name, parent = getattr(strange, "name", str(strange)), getattr(strange, "parent", "a str")
            names = [param.name for stage in nested for param in stage.params]
            raise ConfigError(
                f"a param map sets {name!r} of {parent}, which is no stage of the estimator",
                hint=f"build the grid with the Params of this estimator; {nearest(name, names)}",
                param=name,
            )
        stages = estimator.getStages() if isinstance(estimator, Pipeline) else [estimator]
        requests = []
        for stage in stages:
            if not isinstance(stage, TorchEstimatorBase):
                continue
            for params in maps:
                configured = stage.copy(params)
                request = translate(configured, stage._task)
                requests.append(request)
                check_no_checkpoints(Values(configured))
                if request.columns["groups"] is not None and not self.getFoldCol():
                    raise ConfigError(
                        "foldCol is not set, and folds drawn row by row would divide the groups",
                        hint="name a column of folds that is the same in all rows of a group, as by its hash",
                        param="foldCol",
                    )
        return requests

    def _carried(self, estimators: list[Any], requests: list[Request[TrainJob]], dataset: DataFrame) -> tuple[str, ...]:
        """Returns the numeric columns that the evaluator reads beside the predictions.

        A `NotInOnePass` says that one pass is impossible.
        """
        if not isinstance(self.getEstimator(), TorchEstimatorBase) or any(
            candidate._learns for candidate in estimators
        ):
            name = type(self.getEstimator()).__name__
            raise NotInOnePass(f"{name} learns of the rows that train, of each fold anew, or is of another package")
        evaluator, names = self.getEvaluator(), ColumnNames.of(dataset)
        read = columns_of(evaluator)
        # Each set has the output columns of the models of one estimator.
        outputs_of = [
            {candidate.getOrDefault(name) for name in _OUTPUTS if candidate.hasParam(name)} - {""}
            for candidate in estimators
        ]
        carried = [name for name in dict.fromkeys(read) if any(name not in outputs for outputs in outputs_of)]
        strange = [
            name for name in carried if not names.called(name) or not isinstance(names.type_of(name), T.NumericType)
        ]
        why = ""
        if any(request.rows != requests[0].rows for request in requests):
            why = "the param maps need different rows"
        elif obstacle(requests[0], dataset.sparkSession) is not None:
            why = "ranks cannot hold rows"
        elif requests[0].job.storage.kind != "memory" or requests[0].columns["groups"] is not None:
            why = "storage is not 'memory', or rows have groups"
        elif any(names.called(name) for name in set().union(*outputs_of)):
            # `CrossValidator` itself calls `transform`, which refuses this and says so.
            why = "the DataFrame already has an output column of the model"
        elif not any(outputs.intersection(read) for outputs in outputs_of):
            why = f"{type(evaluator).__name__} names no output column of the model"
        elif strange:
            why = f"the evaluator reads {strange[0]!r}, which is no number, and not every model makes it"
        if why:
            raise NotInOnePass(why)
        return tuple(carried)

    def _fit_pipeline(self, dataset: DataFrame) -> CrossValidatorModel:
        """Lets Spark's `CrossValidator` fit a pipeline whose first stages are fitted once per fold."""
        pipeline: Any = self.getEstimator()
        ours = [index for index, stage in enumerate(pipeline.getStages()) if isinstance(stage, TorchEstimatorBase)]
        if not ours:
            return super()._fit(dataset)
        inner = CrossValidator.copy(self)
        inner._set(estimator=_PrefixFittedOnce(pipeline, ours[0]))
        model = CrossValidator._fit(inner, dataset)
        model._set(estimator=pipeline)
        return model

    @classmethod
    def read(cls) -> CrossValidatorReader:
        """Returns a reader."""
        return _Reader(cls)


def _check_params(p: Values) -> None:
    """Refuses a search that lacks a part, or has too few folds."""
    for name in ("estimator", "evaluator", "estimatorParamMaps"):
        if p[name] is None:
            raise ConfigError(f"{name} is not set", hint=f"set {name}", param=name, code="ST-NOT-SET")
    if not p["estimatorParamMaps"]:
        raise ConfigError(
            "estimatorParamMaps is empty", hint="[{}] fits it as it is", param="estimatorParamMaps", code="ST-NOT-SET"
        )
    if p["numFolds"] < 2:
        raise ConfigError(
            f"numFolds is {p['numFolds']}, which leaves no rows to train on",
            hint="set 2 or more",
            param="numFolds",
            code="ST-CLASH",
        )


class _Reader(CrossValidatorReader):
    def load(self, path: str) -> TorchCrossValidator:
        """Loads what `write` has saved."""
        session = ml_session(self.sparkSession)
        metadata = DefaultParamsReader.loadMetadata(path, session)
        # pyspark takes classes outside of its own package for those of Java's writers.
        as_pyspark = {**metadata, "class": "pyspark.ml.tuning.CrossValidator"}
        _, estimator, evaluator, maps = _ValidatorSharedReadWrite.load(path, session, as_pyspark)
        validator = TorchCrossValidator(estimator=estimator, estimatorParamMaps=maps, evaluator=evaluator)
        validator._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(validator, metadata, skipParams=["estimatorParamMaps"])
        return validator


class _PrefixFittedOnce(Estimator[PipelineModel]):
    """Fits the stages before our estimator once, and our estimator with `fitMultiple`.

    Settings that touch the stages before ours are fitted one by one.
    """

    def __init__(self, pipeline: Pipeline, position: int) -> None:
        """Sets the pipeline, and the position of our estimator among its stages."""
        super().__init__()
        self._pipeline, self._position = pipeline, position

    def copy(self, extra: ParamMap | None = None) -> _PrefixFittedOnce:
        """Copies it; the Params in `extra` are those of the pipeline."""
        return _PrefixFittedOnce(self._pipeline.copy(extra), self._position)

    def _fit(self, dataset: DataFrame) -> PipelineModel:
        return self._pipeline.fit(dataset)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[ParamMap]) -> Iterator[tuple[int, PipelineModel]]:
        """Yields a model for each setting, with its index; thread-safe."""
        return _Models(self._pipeline, self._position, dataset, paramMaps)


class _Models(Iterator[tuple[int, PipelineModel]]):
    """The models of a pipeline for several param maps, each with its index; several threads may take them."""

    def __init__(self, pipeline: Pipeline, position: int, dataset: DataFrame, maps: Sequence[ParamMap]) -> None:
        self._pipeline, self._dataset, self._maps = pipeline, dataset, maps
        self._stages, self._position = pipeline.getStages(), position
        # A param map that sets a Param of the pipeline, or of a stage before ours, needs a fit of all stages.
        uids_before = {pipeline.uid}
        for stage in self._stages[:position]:
            uids_before |= {nested.uid for nested in MetaAlgorithmReadWrite.getAllNestedStages(stage)}
        refits = [any(param.parent in uids_before for param in params) for params in maps]
        self._refitted = iter([index for index in range(len(maps)) if refits[index]])
        self._ours = self._fit_ours([index for index in range(len(maps)) if not refits[index]])
        self._lock = Lock()

    def __next__(self) -> tuple[int, PipelineModel]:
        with self._lock:
            ours = next(self._ours, None)
            index = next(self._refitted) if ours is None else ours[0]
        # Stages are fitted outside of the lock, so that several threads fit at once.
        if ours is None:
            return index, self._pipeline.fit(self._dataset, self._maps[index])
        return index, self._completed(*ours)

    def _fit_ours(self, indices: list[int]) -> Iterator[tuple[int, list[Any], DataFrame]]:
        """Fits the stages before ours, and yields them with ours for each index, and the rows that ours gets."""
        if not indices:
            return
        fitted, data = [], self._dataset
        for stage in self._stages[: self._position]:
            fitted.append(stage.fit(data) if isinstance(stage, Estimator) else stage)
            data = fitted[-1].transform(data)
        ours: Any = self._stages[self._position]
        for number, model in ours.fitMultiple(data, [self._maps[index] for index in indices]):
            yield indices[number], [*(stage.copy() for stage in fitted), model], data

    def _completed(self, index: int, fitted: list[Any], data: DataFrame) -> PipelineModel:
        """Returns the pipeline's model, with the stages after ours fitted on what ours makes of the rows."""
        # As in Spark's pipeline, rows are transformed only as far as the last estimator needs them.
        last = max(position for position, stage in enumerate(self._stages) if isinstance(stage, Estimator))
        for position, unset in enumerate(self._stages[self._position + 1 :], self._position + 1):
            if position <= last:
                data = fitted[-1].transform(data)
            stage = unset.copy(self._maps[index])
            fitted.append(stage.fit(data) if isinstance(stage, Estimator) else stage)
        return PipelineModel(fitted)
