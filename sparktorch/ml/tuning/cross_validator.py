"""`TorchCrossValidator`: Spark's `CrossValidator`, with the data set read once for all folds and models."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pyspark.errors import AnalysisException
from pyspark.ml import Model, Pipeline
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, CrossValidatorReader, _ValidatorSharedReadWrite
from pyspark.ml.util import DefaultParamsReader
from pyspark.sql import DataFrame

from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.holdable import can_hold, rows_of
from sparktorch.ml.fit.translate import translate
from sparktorch.ml.tuning.discard import discard
from sparktorch.ml.tuning.folded_rows import FoldedRows, NotInOnePass, with_folds
from sparktorch.ml.tuning.metrics import Metrics, carried_columns, results_for, weight_of
from sparktorch.ml.tuning.pipeline import PrefixFittedOnce
from sparktorch.ml.tuning.refusals import check_search
from sparktorch.spark.compat import ml_session
from sparktorch.spark.rdd import dataframe_of

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap

__all__ = ["TorchCrossValidator"]

_LOG = logging.getLogger(__name__)


class TorchCrossValidator(CrossValidator):
    """Spark's `CrossValidator`, which reads the data set once for all folds and param maps.

    The Params, the folds and the model that `fit` returns are those of `CrossValidator`. Ranks hold the rows with their
    folds, in one barrier job: they train without a fold, score the fold, and the evaluator gets the scores. Where that
    is impossible, `CrossValidator`'s own way is taken, and a line in the log (INFO) says why.

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
        check_search(self)
        dataset = dataframe_of(dataset, "fit")
        estimator, maps = self.getEstimator(), self.getEstimatorParamMaps()
        if isinstance(estimator, Pipeline):
            once = PrefixFittedOnce.of(estimator, maps)
            if isinstance(once, PrefixFittedOnce):
                return self._fit_pipeline(once, dataset)
            _LOG.info("each param map is fitted alone: %s", once)
            return super()._fit(dataset)
        if not isinstance(estimator, TorchEstimatorBase):
            _LOG.info("folds are read one by one: %s is no estimator of this package", type(estimator).__name__)
            return super()._fit(dataset)
        copies = [estimator.copy(params) for params in maps]
        carried = self._carried(copies, dataset)
        if not isinstance(carried, str):
            try:
                return self._fit_in_one_pass(copies, maps, dataset, carried)
            except NotInOnePass as reason:
                carried = str(reason)
            except AnalysisException as error:  # an evaluator that reads more than its Params name
                if "UNRESOLVED_COLUMN" not in str(error):
                    raise
                carried = "the evaluator reads columns that its Params do not name"
        _LOG.info("folds are read one by one: %s", carried)
        return super()._fit(dataset)

    def _carried(self, estimators: Sequence[Any], dataset: DataFrame) -> tuple[str, ...] | str:
        """Returns the columns that the evaluator reads beside the predictions; or why one pass is impossible."""
        requests = [translate(estimator, estimator._task) for estimator in estimators]
        first = requests[0]
        if any(rows_of(request) != rows_of(first) for request in requests):
            return "the param maps need different rows"
        if not can_hold(first, dataset.sparkSession):
            return "ranks cannot hold rows"
        if first.storage.kind != "memory":
            return "storage is not 'memory'"
        return carried_columns(self.getEvaluator(), dataset, list(estimators))

    def _fit_in_one_pass(
        self, estimators: Sequence[Any], maps: Sequence[ParamMap], dataset: DataFrame, carried: Sequence[str]
    ) -> CrossValidatorModel:
        evaluator, folds, column = self.getEvaluator(), self.getNumFolds(), self.getFoldCol()
        name = f"{self.uid}_fold".replace(".", "_")
        data = with_folds(dataset, name, folds=folds, seed=self.getSeed(), column=column)
        models: list[list[Any]] = [[None] * len(maps) for _ in range(folds)]
        drawn, count, weight = not column, folds * len(maps) + 1, weight_of(evaluator, carried)
        held: dict[str, Any] = {"fold": name, "folds": folds, "drawn": drawn, "carried": carried, "weight": weight}
        with (
            Metrics(evaluator, dataset.sparkSession, parallelism=self.getParallelism(), weight=weight) as metrics,
            FoldedRows(estimators[0], data, **held) as rows,
            ExitStack() as unreturned,
        ):
            for fold in range(folds):
                for index, estimator in enumerate(estimators):
                    title = f"fit {fold * len(maps) + index + 1} of {count}"
                    model = rows.fit(estimator, without=fold, title=title)
                    models[fold][index] = model if self.getCollectSubModels() else None
                    with ExitStack() as scored_once:
                        (unreturned if self.getCollectSubModels() else scored_once).callback(discard, model)
                        shown = model.copy(maps[index])
                        scored = rows.score(shown, fold, results_for(evaluator, shown))
                        metrics.add(rows, fold, index, shown, scored)
            found = metrics.all(rows, folds, len(maps))
            means, deviations = self._gen_avg_and_std_metrics(found)
            best = int(np.argmax(means) if evaluator.isLargerBetter() else np.argmin(means))
            model = rows.fit(estimators[best], without=None, title=f"fit {count} of {count}")
            unreturned.pop_all()
        kept = cast("list[list[Model]]", models) if self.getCollectSubModels() else None
        return self._copyValues(CrossValidatorModel(model, means, kept, deviations))

    def _fit_pipeline(self, once: PrefixFittedOnce, dataset: DataFrame) -> CrossValidatorModel:
        """Lets Spark's `CrossValidator` fit a pipeline whose first stages are fitted once per fold."""
        inner = CrossValidator.copy(self)
        inner._set(estimator=once)
        model = CrossValidator._fit(inner, dataset)
        model._set(estimator=self.getEstimator())
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
