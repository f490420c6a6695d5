"""`TorchCrossValidator`: Spark's `CrossValidator`, with the data set read once for all folds and models."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
from pyspark.errors import AnalysisException
from pyspark.ml import Model, Pipeline
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, CrossValidatorReader, _ValidatorSharedReadWrite
from pyspark.ml.util import DefaultParamsReader
from pyspark.sql import DataFrame

from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.holdable import can_hold, rows_of
from sparktorch.ml.fit.translate import translate
from sparktorch.ml.tuning.checks import check_folds
from sparktorch.ml.tuning.folded_rows import FoldedRows, NotInOnePass
from sparktorch.ml.tuning.metrics import Metrics, carried_columns, results_for, weight_of
from sparktorch.ml.tuning.pipeline import PrefixFittedOnce
from sparktorch.ml.tuning.tuned_model import discard
from sparktorch.spark.compat import ml_session
from sparktorch.spark.rdd import dataframe_of

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
        check_folds(self)
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
        with (
            FoldedRows(self, estimators[0], dataset, carried=carried, weight=weight) as rows,
            Metrics(evaluator, rows, parallelism=self.getParallelism(), weight=weight) as metrics,
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
                        metrics.add(fold, index, shown, rows.score(shown, fold, results_for(evaluator, shown)))
            means, deviations = self._gen_avg_and_std_metrics(metrics.all(folds, len(maps)))
            best = int(np.argmax(means) if evaluator.isLargerBetter() else np.argmin(means))
            model = rows.fit(estimators[best], without=None, title=f"fit {count} of {count}")
            unreturned.pop_all()
        kept = cast("list[list[Model]]", models) if self.getCollectSubModels() else None
        return self._copyValues(CrossValidatorModel(model, means, kept, deviations))

    def _carried(self, estimators: list[Any], dataset: DataFrame) -> tuple[str, ...]:
        """Returns the columns that the evaluator reads beside the predictions.

        Raises:
            NotInOnePass: One pass is impossible.
        """
        if not isinstance(self.getEstimator(), TorchEstimatorBase):
            raise NotInOnePass(f"{type(self.getEstimator()).__name__} is no estimator of this package")
        requests = [translate(estimator, estimator._task) for estimator in estimators]
        if any(rows_of(request) != rows_of(requests[0]) for request in requests):
            raise NotInOnePass("the param maps need different rows")
        if not can_hold(requests[0], dataset.sparkSession):
            raise NotInOnePass("ranks cannot hold rows")
        if requests[0].storage.kind != "memory":
            raise NotInOnePass("storage is not 'memory'")
        return carried_columns(self.getEvaluator(), dataset, estimators)

    def _fit_pipeline(self, dataset: DataFrame) -> CrossValidatorModel:
        """Lets Spark's `CrossValidator` fit a pipeline whose first stages are fitted once per fold."""
        pipeline: Any = self.getEstimator()
        ours = [place for place, stage in enumerate(pipeline.getStages()) if isinstance(stage, TorchEstimatorBase)]
        if not ours:
            raise NotInOnePass("the pipeline has no estimator of this package")
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
