"""`TorchCrossValidator` gives the numbers and models of Spark's own, and reads the rows once."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark import BarrierTaskContext, TaskContext
from pyspark.errors import IllegalArgumentException
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import (
    Evaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.feature import Normalizer, StandardScaler
from pyspark.ml.functions import array_to_vector
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparktorch import TorchClassifier, TorchCrossValidator, TorchRegressor
from sparktorch.errors import ColumnError, SparkTorchError
from sparktorch.ml.tuning.folded_rows import FoldedRows
from sparktorch.ml.tuning.metrics import metric_of, weight_of
from tests.spark.modules import MLP
from tests.spark.scored import same_weights
from tests.support.sessions import slots_held

# Spark's own CrossValidator leaves its thread pool to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

CONFUSION = (
    *("f1", "accuracy", "weightedPrecision", "weightedRecall", "weightedTruePositiveRate", "hammingLoss"),
    *("weightedFalsePositiveRate", "weightedFMeasure", "truePositiveRateByLabel", "falsePositiveRateByLabel"),
    *("precisionByLabel", "recallByLabel", "fMeasureByLabel"),
)
GIVEN: dict[str, Any] = {"module": MLP, "numWorkers": 2, "batchSize": 64, "epochs": 2, "progress": False, "seed": 3}


def classifier(outputs: int = 3, **params: Any) -> TorchClassifier:
    return TorchClassifier(**{**GIVEN, "moduleParams": {"outputs": outputs}, **params})


def regressor(**params: Any) -> TorchRegressor:
    return TorchRegressor(**{**GIVEN, "labelCol": "target", **params})


def rates(estimator: Any, *values: float) -> list[Any]:
    return [{estimator.learningRate: value} for value in values or (0.01, 0.0001)]


def search(kind: type[CrossValidator], estimator: Any, evaluator: Any, **params: Any) -> CrossValidator:
    given = {"numFolds": 2, "seed": 7, "estimatorParamMaps": [{}], **params}
    return kind(estimator=estimator, evaluator=evaluator, **given)


def halves(frame: DataFrame, seed: int = 7) -> list[DataFrame]:
    drawn = frame.select("*", F.rand(seed).alias("draw"))
    return [drawn.where(~((F.col("draw") >= i / 2) & (F.col("draw") < (i + 1) / 2))).drop("draw") for i in range(2)]


# Of predictions and of a regression. A pipeline's, below, is of probabilities; test_evaluators.py has one of scores.
CASES: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "weighted": (
        classifier,
        {"weightCol": "weight"},
        partial(MulticlassClassificationEvaluator, weightCol="weight"),
        {},
    ),
    "the user's folds": (
        regressor,
        {},
        partial(RegressionEvaluator, metricName="r2"),
        {"foldCol": "fold", "numFolds": 3},
    ),
}


@pytest.fixture(scope="module")
def rows(frame: DataFrame) -> Iterator[DataFrame]:
    place = F.abs(F.xxhash64("target"))
    data = frame.select("*", (place % 7 == 0).alias("mark"), (place % 3).cast("int").alias("fold")).cache()
    yield data
    data.unpersist()


@pytest.fixture
def one_pass(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="sparktorch"):
        yield
    assert "one by one" not in caplog.text


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("case", list(CASES))
def test_the_metrics_are_those_of_spark(rows: DataFrame, case: str) -> None:
    kind, params, evaluated, more = CASES[case]
    estimator, evaluator = kind(**params), evaluated()
    more = {"estimatorParamMaps": rates(estimator), **more}
    if kind is regressor:
        evaluator.setLabelCol("target")
    stock = search(CrossValidator, estimator, evaluator, **more).fit(rows)
    found = search(TorchCrossValidator, estimator, evaluator, **more).fit(rows)
    assert type(found) is CrossValidatorModel
    np.testing.assert_allclose(found.avgMetrics, stock.avgMetrics, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.stdMetrics, stock.stdMetrics, rtol=0, atol=1e-6)
    assert found.avgMetrics[0] != found.avgMetrics[1]
    assert same_weights(found.bestModel, stock.bestModel)


@pytest.mark.usefixtures("one_pass")
def test_every_model_is_that_of_a_fit_alone_bit_for_bit(rows: DataFrame) -> None:
    estimator = classifier(classWeights="balanced", validationIndicatorCol="mark")
    maps = rates(estimator)
    given: dict[str, Any] = {"estimatorParamMaps": maps, "collectSubModels": True}
    found = search(TorchCrossValidator, estimator, MulticlassClassificationEvaluator(), **given).fit(rows)
    for fold, training in enumerate(halves(rows)):
        for index, params in enumerate(maps):
            alone = estimator.fit(training, params)
            sub = found.subModels[fold][index]
            assert same_weights(sub, alone)
            assert sub.summary.rows == alone.summary.rows
            assert sub.summary.fingerprint == alone.summary.fingerprint
            assert [record["loss"] for record in sub.summary.history] == [
                record["loss"] for record in alone.summary.history
            ]
    assert same_weights(found.bestModel, estimator.fit(rows, maps[int(np.argmax(found.avgMetrics))]))
    assert not same_weights(found.subModels[0][0], found.subModels[1][0])


@pytest.mark.usefixtures("one_pass")
def test_a_confusion_matrix_travels_in_place_of_rows(rows: DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[pa.Table] = []

    def noted(evaluator: Evaluator, table: pa.Table) -> float | None:
        tables.append(table)
        return metric_of(evaluator, table)

    monkeypatch.setattr("sparktorch.ml.tuning.metrics.metric_of", noted)
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    found = search(TorchCrossValidator, classifier(), evaluator).fit(rows)
    assert found.avgMetrics == search(CrossValidator, classifier(), evaluator).fit(rows).avgMetrics
    assert {len(table.column_names) for table in tables} == {3}  # label, prediction, weight
    assert max(table.num_rows for table in tables) <= 2 * 3 * 3


def test_all_metrics_of_a_confusion_matrix_are_those_of_the_rows(rows: DataFrame) -> None:
    table = rows.selectExpr("label", "double((label + hash(target) % 2 + 3) % 3) prediction", "double(weight) weight")
    counted = table.groupBy("label", "prediction").agg(F.sum("weight").alias("weight"))
    for name in CONFUSION:
        evaluator = MulticlassClassificationEvaluator(metricName=name, weightCol="weight")  # type: ignore[arg-type]
        assert weight_of(evaluator, ("label", "weight")) == "weight"
        assert evaluator.evaluate(counted) == pytest.approx(evaluator.evaluate(table), rel=1e-12), name


def test_scores_beyond_a_limit_go_the_ordinary_way(
    rows: DataFrame, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = RegressionEvaluator(labelCol="target")
    monkeypatch.setattr("sparktorch.ml.tuning.folded_rows.MOST_BYTES", 8192)
    with caplog.at_level(logging.INFO, logger="sparktorch"):
        found = search(TorchCrossValidator, regressor(), evaluator).fit(rows)
    assert "one by one: the scores of a fold take more than" in caplog.text
    assert len(found.avgMetrics) == 1


class DiesScoring(MLP):
    """Kills a rank the first time that it scores."""

    def __init__(self, marks: str) -> None:
        super().__init__(outputs=1)
        self.marks = marks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and isinstance(TaskContext.get(), BarrierTaskContext) and not Path(self.marks).exists():
            Path(self.marks).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


@pytest.mark.usefixtures("one_pass")
def test_a_rank_that_is_lost_while_it_scores_is_restarted(rows: DataFrame, tmp_path: Path) -> None:
    ours = regressor(module=DiesScoring, moduleParams={"marks": str(tmp_path / "died")}, maxRestarts=1)
    found = search(TorchCrossValidator, ours, RegressionEvaluator(labelCol="target")).fit(rows)
    assert (tmp_path / "died").exists()
    assert len(found.avgMetrics) == 1


def test_folds_that_are_none_are_refused(rows: DataFrame) -> None:
    with pytest.raises(ColumnError, match=r"Fold number must be in range \[0, 2\), which it is not in \d+ rows?"):
        search(TorchCrossValidator, regressor(), RegressionEvaluator(labelCol="target"), foldCol="fold").fit(rows)
    with pytest.raises(ValueError, match="The validation data at fold 3 is empty"):
        search(
            TorchCrossValidator, regressor(), RegressionEvaluator(labelCol="target"), foldCol="fold", numFolds=4
        ).fit(rows)


def counted(frame: DataFrame, file: Path) -> DataFrame:

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with file.open("a") as out:
                out.write("row\n" * batch.num_rows)
            yield batch

    return frame.mapInArrow(read, frame.schema)


class OwnEvaluator(RegressionEvaluator):
    """An evaluator of a user, which alone knows its metric."""


@pytest.mark.parametrize(
    ("evaluator", "workers", "times"),
    [(RegressionEvaluator, 3, 1), (OwnEvaluator, 2, 1), (OwnEvaluator, 3, 2)],
    ids=["Spark's, all slots", "the user's", "the user's, all slots"],
)
@pytest.mark.usefixtures("one_pass")
def test_the_rows_are_read_once_unless_an_evaluator_needs_the_slots_of_all_ranks(
    rows: DataFrame, tmp_path: Path, evaluator: type[RegressionEvaluator], workers: int, times: int
) -> None:
    file = tmp_path / "read"
    estimator = regressor(numWorkers=workers)
    found = search(TorchCrossValidator, estimator, evaluator(labelCol="target")).fit(counted(rows, file))
    assert len(found.avgMetrics) == 1
    first_row = rows.count()  # the partition that the first row comes from
    read = len(file.read_text().splitlines())
    assert (times - 1) * rows.count() + first_row < read <= times * rows.count() + first_row


class Fits:
    """Counts the fits of a class of estimators."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> None:
        self.count, fit = 0, kind._fit

        def counting(estimator: Any, dataset: DataFrame) -> Any:
            self.count += 1
            return fit(estimator, dataset)

        monkeypatch.setattr(kind, "_fit", counting)


def test_the_first_stages_of_a_pipeline_are_fitted_once_per_fold(
    rows: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = rows.select("label", "target", array_to_vector("features").alias("raw"))
    normalizer = Normalizer(inputCol="raw", outputCol="normal")
    scaler = StandardScaler(inputCol="normal", outputCol="scaled")
    ours = classifier(featuresCol="scaled")
    pipeline = Pipeline(stages=[normalizer, scaler, ours])
    given: dict[str, Any] = {"estimatorParamMaps": rates(ours), "collectSubModels": True}
    evaluator = MulticlassClassificationEvaluator(metricName="logLoss")
    stock = search(CrossValidator, pipeline, evaluator, **given).fit(vectors)
    fits = Fits(monkeypatch, StandardScaler)
    validator = search(TorchCrossValidator, pipeline, evaluator, **given)
    found = validator.fit(vectors)
    assert fits.count == 3, "one for each fold, and one for the best model"
    np.testing.assert_allclose(found.avgMetrics, stock.avgMetrics, rtol=0, atol=1e-6)
    assert same_weights(found.bestModel.stages[-1], stock.bestModel.stages[-1])
    for mine, theirs in zip(chain(*found.subModels), chain(*stock.subModels), strict=True):
        assert same_weights(mine.stages[-1], theirs.stages[-1])
    assert found.getEstimator() is validator.getEstimator()


def test_what_fits_returns_and_the_search_itself_are_saved(rows: DataFrame, tmp_path: Path) -> None:
    ours, evaluator = regressor(), RegressionEvaluator(labelCol="target")
    validator = search(TorchCrossValidator, ours, evaluator, estimatorParamMaps=rates(ours, 0.01))
    found = validator.fit(rows)
    assert type(found) is CrossValidatorModel, "also what Spark's own search returns"
    found.save(str(tmp_path / "model"))
    loaded = CrossValidatorModel.load(str(tmp_path / "model"))
    assert loaded.avgMetrics == found.avgMetrics
    assert same_weights(loaded.bestModel, found.bestModel)
    validator.save(str(tmp_path / "search"))
    again = TorchCrossValidator.load(str(tmp_path / "search"))
    assert type(again) is TorchCrossValidator
    assert (again.uid, again.getNumFolds(), again.getSeed()) == (validator.uid, 2, 7)
    assert len(again.getEstimatorParamMaps()) == 1


class Spread(Evaluator):
    """Reads a column that none of its Params names."""

    def _evaluate(self, dataset: DataFrame) -> float:
        return float(dataset.select(F.max(F.col("weight") * F.col("prediction"))).head()[0])

    def isLargerBetter(self) -> bool:  # noqa: N802
        return True


def test_an_evaluator_that_reads_other_columns_gets_them(rows: DataFrame, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sparktorch"):
        found = search(TorchCrossValidator, regressor(), Spread()).fit(rows)
    assert "one by one: Spread names no output column of the model" in caplog.text
    assert len(found.avgMetrics) == 1


def test_what_sparks_evaluator_refuses_is_refused_before_any_job(rows: DataFrame) -> None:
    jobs = len(rows.sparkSession.sparkContext.statusTracker().getJobIdsForGroup(None))
    misspelt = MulticlassClassificationEvaluator(metricName="acc")  # type: ignore[arg-type]
    with pytest.raises(IllegalArgumentException, match="acc"):
        search(TorchCrossValidator, classifier(), misspelt).fit(rows)
    assert len(rows.sparkSession.sparkContext.statusTracker().getJobIdsForGroup(None)) == jobs


def test_a_stage_within_a_stage_is_fitted_with_what_a_map_sets(frame: DataFrame) -> None:
    vectors = frame.withColumn("raw", array_to_vector("features")).drop("features")
    scaler = StandardScaler(inputCol="raw", outputCol="features")
    pipeline = Pipeline(stages=[Pipeline(stages=[scaler]), regressor()])
    maps = [{scaler.withStd: True}, {scaler.withStd: False, scaler.withMean: True}]
    evaluator = RegressionEvaluator(labelCol="target")
    ours, stock = (
        search(kind, pipeline, evaluator, estimatorParamMaps=maps).fit(vectors)
        for kind in (TorchCrossValidator, CrossValidator)
    )
    assert ours.avgMetrics == pytest.approx(stock.avgMetrics, abs=1e-6)
    assert stock.avgMetrics[0] != stock.avgMetrics[1]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[FoldedRows]:
    """The groups of ranks that have fitted."""
    groups, fit = set[FoldedRows](), FoldedRows.fit

    def noted(group: FoldedRows, *given: Any, **named: Any) -> Any:
        groups.add(group)
        return fit(group, *given, **named)

    monkeypatch.setattr(FoldedRows, "fit", noted)
    return groups


def test_groups_of_ranks_train_folds_side_by_side(rows: DataFrame, tmp_path: Path, used: set[FoldedRows]) -> None:
    ours, evaluator = regressor(numWorkers=1), RegressionEvaluator(labelCol="target")
    given: dict[str, Any] = {"parallelism": 2, "collectSubModels": True}
    file = tmp_path / "read"
    found = search(TorchCrossValidator, ours, evaluator, **given).fit(counted(rows, file))
    assert len(used) == 2
    assert len(file.read_text().splitlines()) > 2 * rows.count(), "each group reads all rows"
    alone = search(TorchCrossValidator, ours, evaluator, collectSubModels=True).fit(rows)
    assert found.avgMetrics == alone.avgMetrics
    assert all(map(same_weights, chain(*found.subModels), chain(*alone.subModels)))
    assert same_weights(found.bestModel, alone.bestModel)


def test_slots_that_another_job_holds_get_no_group(rows: DataFrame, tmp_path: Path, used: set[FoldedRows]) -> None:
    evaluator = RegressionEvaluator(labelCol="target")
    with slots_held(rows.sparkSession, 2, tmp_path / "release"):
        found = search(TorchCrossValidator, regressor(numWorkers=1), evaluator, parallelism=2).fit(rows)
    assert (len(found.avgMetrics), len(used)) == (1, 1)


class Raises(MLP):
    """Cannot be trained in a rank that holds rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and isinstance(TaskContext.get(), BarrierTaskContext):
            raise RuntimeError("no such model")
        return super().forward(x)


def test_an_error_ends_the_fits_of_other_groups_and_is_the_one_that_is_raised(
    rows: DataFrame, used: set[FoldedRows]
) -> None:
    ours = regressor(numWorkers=1, moduleParams={"outputs": 1})
    maps = [{ours.epochs: 100_000}, {ours.module: Raises}]
    validator = search(
        TorchCrossValidator, ours, RegressionEvaluator(labelCol="target"), estimatorParamMaps=maps, parallelism=2
    )
    with pytest.raises(SparkTorchError, match="no such model"):
        validator.fit(rows)
    assert len(used) == 2
    assert not any(group.slots_held for group in used)


def test_groups_that_read_other_folds_are_given_up(
    rows: DataFrame, caplog: pytest.LogCaptureFixture, used: set[FoldedRows]
) -> None:
    def in_any_order(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.take(pa.array(np.random.default_rng().permutation(batch.num_rows)))

    evaluator = RegressionEvaluator(labelCol="target")
    validator = search(TorchCrossValidator, regressor(numWorkers=1), evaluator, parallelism=2)
    with caplog.at_level(logging.INFO, logger="sparktorch"):
        found = validator.fit(rows.mapInArrow(in_any_order, rows.schema))
    assert "one by one: the DataFrame, read again, has other rows, or in other folds" in caplog.text
    assert (len(found.avgMetrics), len(used)) == (1, 2)
