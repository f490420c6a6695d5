"""What a user of Spark ML reaches for, beside Spark's own models of the very same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression, LogisticRegressionModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import IndexToString, StringIndexer, VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.ml.regression import LinearRegression, LinearRegressionModel
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchClassificationModel, TorchClassifier, TorchModel, TorchRegressionModel
from sparktorch.base.config import Task
from sparktorch.base.state_dict import pack_state
from sparktorch.data.columns import TensorSpec
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.ml.scoring import evaluation
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.recipe.dry_run import OutputSpec
from tests.spark.modules import Counted, TwoInputs
from tests.spark.scored import sorted_rows

# Spark leaves its cross-validation thread pool open.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function Pool:pytest.PytestUnraisableExceptionWarning"
)
NAMES = ["low", "middle", "high"]
FEATURES = TensorSpec(name="x0", column="features", dtype="float32", shape=(5,), kind="vector")


def linear(task: Task, weight: Any, bias: Any) -> TrainedModule:
    state = {"weight": torch.tensor(np.atleast_2d(weight)).float(), "bias": torch.tensor(np.atleast_1d(bias)).float()}
    outputs = len(state["bias"])
    return TrainedModule(
        source="torch.nn:Linear",
        params={"in_features": 5, "out_features": outputs},
        weights=pack_state(state),
        inputs=(FEATURES,),
        outputs=(OutputSpec("", (outputs,)),),
        task=task,
    )


def classifier(model: LogisticRegressionModel) -> TorchClassificationModel:
    weight, bias = model.coefficientMatrix.toArray(), model.interceptVector.toArray()
    return TorchClassificationModel()._with(linear("classification", weight, bias), None)


def described(data: DataFrame) -> list[Any]:
    return [(field.name, field.dataType, field.metadata) for field in data.schema]


@pytest.fixture(scope="module")
def rows(frame: DataFrame) -> DataFrame:
    words = F.element_at(F.array(*map(F.lit, NAMES)), F.col("label").cast("int") + 1)
    return frame.select(
        *(array_to_vector("features").alias("features"), "label", "target", "weight"),
        *((F.col("label") > 0).cast("double").alias("two"), words.alias("word")),
    ).cache()


@pytest.fixture(scope="module")
def threefold(rows: DataFrame) -> LogisticRegressionModel:
    return LogisticRegression(weightCol="weight", maxIter=5).fit(rows)


@pytest.fixture(scope="module")
def twofold(rows: DataFrame) -> LogisticRegressionModel:
    return LogisticRegression(labelCol="two", maxIter=3).fit(rows)


@pytest.fixture(scope="module")
def line(rows: DataFrame) -> LinearRegressionModel:
    return LinearRegression(labelCol="target", weightCol="weight", maxIter=3, regParam=0.3).fit(rows)


@pytest.fixture(scope="module")
def validated(rows: DataFrame) -> CrossValidatorModel:
    ours = TorchClassifier(
        module="torch.nn:Linear",
        moduleParams={"in_features": 5, "out_features": 2},
        featuresCol="assembled",
        labelCol="index",
        learningRate=0.05,
        progress=False,
    )
    pipeline = Pipeline(
        stages=[
            StringIndexer(inputCol="word", outputCol="index", stringOrderType="alphabetAsc"),
            VectorAssembler(inputCols=["features"], outputCol="assembled"),
            ours,
            IndexToString(inputCol="prediction", outputCol="said"),
        ]
    )
    evaluator = BinaryClassificationEvaluator(labelCol="index")
    grid = ParamGridBuilder().addGrid(ours.epochs, [3]).build()
    search = CrossValidator(estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=1)
    return search.fit(rows.where("word != 'middle'"))


def test_columns_are_those_of_sparks_own_classifier(rows: DataFrame, threefold: LogisticRegressionModel) -> None:
    ours, theirs = classifier(threefold).transform(rows), threefold.transform(rows)
    assert described(ours) == described(theirs)
    for mine, other in zip(sorted_rows(ours), sorted_rows(theirs), strict=True):
        assert mine["prediction"] == other["prediction"]
        for name in ("rawPrediction", "probability"):
            np.testing.assert_allclose(mine[name].toArray(), other[name].toArray(), atol=1e-5)
    half = classifier(threefold).setRawPredictionCol("").setProbabilityCol("")
    assert half.transform(rows).columns == [*rows.columns, "prediction"]
    assert half.setPredictionCol("").transform(rows).columns == rows.columns


@pytest.mark.parametrize("thresholds", [[0.5, 0.4, 0.2], [0.9, 0.0, 0.9]])
def test_thresholds_decide_as_sparks_do(
    rows: DataFrame, threefold: LogisticRegressionModel, thresholds: list[float]
) -> None:
    ours = classifier(threefold).setThresholds(thresholds)
    theirs = threefold.copy({threefold.thresholds: thresholds})
    both = theirs.setPredictionCol("expected").setRawPredictionCol("").setProbabilityCol("").transform(rows)
    found = ours.transform(both).collect()
    assert len(found) == 1001
    assert all(row["prediction"] == row["expected"] for row in found)
    assert all(ours.predict(row["features"]) == row["expected"] for row in found[::100])


def test_thresholds_outlive_saving_and_hold_in_sql(
    rows: DataFrame, threefold: LogisticRegressionModel, tmp_path: Path
) -> None:
    ours = classifier(threefold).setThresholds([0.9, 0.0, 0.9])
    ours.save(str(tmp_path / "model"))
    loaded = TorchClassificationModel.load(str(tmp_path / "model"))
    assert loaded.getThresholds() == [0.9, 0.0, 0.9]
    loaded.registerUDF("decided")
    scored = ours.transform(rows).selectExpr("prediction", "decided(features)", "probability").collect()
    assert all(row[0] == row[1] for row in scored)
    assert any(row[1] != row["probability"].argmax() for row in scored)


def test_thresholds_that_spark_refuses_are_refused(rows: DataFrame, threefold: LogisticRegressionModel) -> None:
    for thresholds in ([0.5, 0.5], [0.0, 0.0, 1.0], [-1.0, 1.0, 1.0]):
        with pytest.raises(ConfigError, match="thresholds"):
            classifier(threefold).setThresholds(thresholds).transform(rows)


def test_one_row_is_scored_without_a_job_as_spark_and_transform_score_it(
    spark: SparkSession, rows: DataFrame, threefold: LogisticRegressionModel
) -> None:
    ours = classifier(threefold)
    assert (ours.numFeatures, ours.numClasses) == (threefold.numFeatures, threefold.numClasses)
    row = ours.transform(rows).first()
    assert row is not None
    tracker = spark.sparkContext.statusTracker()
    spark.sparkContext.setJobGroup("single rows", "")
    values = row["features"]
    sparse = Vectors.sparse(5, range(5), values.toArray())
    for value in (values, sparse, values.toArray(), values.toArray().tolist(), row, {"features": values}):
        assert ours.predict(value) == row["prediction"]
        for method, name in (("predictRaw", "rawPrediction"), ("predictProbability", "probability")):
            found = getattr(ours, method)(value)
            assert isinstance(found, DenseVector)
            np.testing.assert_allclose(found.toArray(), row[name].toArray(), rtol=1e-5)
            np.testing.assert_allclose(found.toArray(), getattr(threefold, method)(values).toArray(), atol=1e-5)
    assert not tracker.getJobIdsForGroup("single rows")
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    with pytest.raises(ColumnError, match="not hold 5 values"):
        ours.predict([1.0, 2.0])
    with pytest.raises(ColumnError, match="has 1 row with null values"):
        ours.predict([1.0, 2.0, None, 4.0, 5.0])
    assert ours.copy().setHandleInvalid("keep").predictRaw([1.0, 2.0, None, 4.0, 5.0]) is None
    with pytest.raises(ColumnError, match="does not fit"):
        ours.predict("words")


def test_one_row_of_several_inputs_goes_by_name() -> None:
    module = TwoInputs(named=True)
    specs = (TensorSpec(name="x0", column="i", dtype="int64"), TensorSpec(name="x1", column="v", dtype="float32"))
    trained = TrainedModule(
        source=TwoInputs,
        params={"named": True},
        weights=pack_state(module.state_dict()),
        inputs=specs,
        outputs=(OutputSpec("total", ()), OutputSpec("base", ())),
        task="generic",
    )
    model = TorchModel()._with(trained, None).setInputCols(["i", "v"]).setOutputCols(["t", "b"])
    with torch.no_grad():
        expected = module(torch.tensor([3]), torch.tensor([0.5]))
    for row in (Row(v=0.5, i=3), {"i": 3, "v": 0.5, "more": "x"}):
        assert model.predict(row) == {"t": expected["total"].item(), "b": expected["base"].item()}
    assert model.numFeatures == 2
    with pytest.raises(ColumnError, match="no column 'v'"):
        model.predict({"i": 3})
    with pytest.raises(ColumnError, match="several columns, i, v, and got one value"):
        model.predict([3, 0.5])


def test_evaluate_gives_the_figures_of_sparks_own_summary(rows: DataFrame, threefold: LogisticRegressionModel) -> None:
    theirs = threefold.evaluate(rows)
    ours = classifier(threefold).setWeightCol("weight").setPredictionCol("").evaluate(rows)
    single = ("accuracy", "weightedPrecision", "weightedRecall", "weightedTruePositiveRate")
    for name in (*single, "weightedFalsePositiveRate", "labels"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9)
    for name in ("precisionByLabel", "recallByLabel", "truePositiveRateByLabel", "falsePositiveRateByLabel"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9)
    for beta in (1.0, 0.5):
        assert ours.weightedFMeasure(beta) == pytest.approx(theirs.weightedFMeasure(beta), rel=1e-9)
        assert ours.fMeasureByLabel(beta) == pytest.approx(theirs.fMeasureByLabel(beta), rel=1e-9)
    assert ours.numInstances == 1001
    assert repr(ours).startswith(f"ClassificationSummary(numInstances=1,001, accuracy={ours.accuracy:.4g}, weighted")
    assert np.trace(ours.confusionMatrix) / np.sum(ours.confusionMatrix) == pytest.approx(ours.accuracy)
    assert len(ours.predictions.select(ours.predictionCol, ours.labelCol).collect()) == 1001


def test_evaluate_scores_the_rows_once(rows: DataFrame, twofold: LogisticRegressionModel, tmp_path: Path) -> None:
    usual, marks = classifier(twofold).trained, tmp_path / "marks"
    params = {**usual.params, "marks": str(marks)}
    model = TorchClassificationModel()._with(replace(usual, source=Counted, params=params), None).setLabelCol("two")
    assert model.evaluate(rows).areaUnderROC > 0.5
    assert marks.stat().st_size == rows.count()


@pytest.fixture
def collected(rows: DataFrame, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts, collect = [], type(rows).collect

    def counting(data: DataFrame) -> list[Row]:
        found = collect(data)
        counts.append(len(found))
        return found

    monkeypatch.setattr(type(rows), "collect", counting)
    return counts


def test_evaluate_brings_no_more_labels_to_the_driver_than_classes_and_one(
    rows: DataFrame, threefold: LogisticRegressionModel, collected: list[int]
) -> None:
    with pytest.raises(ColumnError, match=r"column 'target' holds .*, and the model knows the classes 0 \.\.\. 2"):
        classifier(threefold).setLabelCol("target").evaluate(rows)
    assert sum(collected) <= 4 * 3


def test_evaluate_of_many_classes_brings_sums_to_the_driver_and_the_matrix_on_demand(
    rows: DataFrame, threefold: LogisticRegressionModel, collected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = classifier(threefold).setWeightCol("weight")
    few = model.evaluate(rows)
    monkeypatch.setattr(evaluation, "_MATRIX_CLASSES", 2)
    collected.clear()
    many = model.evaluate(rows)
    assert (many.labels, many.weightedFMeasure()) == (few.labels, pytest.approx(few.weightedFMeasure(), rel=1e-12))
    assert many.precisionByLabel == pytest.approx(few.precisionByLabel, rel=1e-12)
    assert many.falsePositiveRateByLabel == pytest.approx(few.falsePositiveRateByLabel, rel=1e-12)
    assert collected == [3, 3]
    np.testing.assert_allclose(many.confusionMatrix, few.confusionMatrix, rtol=1e-12)


def test_evaluate_of_a_regression_gives_the_figures_of_sparks_own_summary(
    rows: DataFrame, line: LinearRegressionModel
) -> None:
    theirs = line.evaluate(rows)
    ours = TorchRegressionModel()._with(linear("regression", line.coefficients.toArray(), line.intercept), None)
    assert described(ours.transform(rows)) == described(line.transform(rows))
    assert ours.copy().setPredictionCol("").transform(rows).columns == rows.columns
    ours = ours.setLabelCol("target").setWeightCol("weight")
    found = ours.evaluate(rows)
    for name in ("rootMeanSquaredError", "meanSquaredError", "meanAbsoluteError", "r2", "explainedVariance"):
        assert getattr(found, name) == pytest.approx(getattr(theirs, name), rel=1e-5)
    assert found.numInstances == theirs.numInstances
    mine, other = found.residuals.agg(F.sum("residuals")).first(), theirs.residuals.agg(F.sum("residuals")).first()
    assert mine is not None
    assert other is not None
    assert mine[0] == pytest.approx(other[0], rel=1e-3)
    value = rows.first()
    assert value is not None
    assert ours.predict(value) == pytest.approx(line.predict(value["features"]), rel=1e-4)
    with pytest.raises(ColumnError, match="must be a number") as caught:
        ours.copy().setLabelCol("word").evaluate(rows)
    assert "cast" in caught.value.hint
    assert "StringIndexer" not in caught.value.hint


def test_evaluate_names_what_cannot_be_compared(rows: DataFrame, threefold: LogisticRegressionModel) -> None:
    model = classifier(threefold)
    holes = rows.withColumn("features", F.when(F.col("target") < 0, F.col("features")))
    kept, skipped = (model.copy().setHandleInvalid(value) for value in ("keep", "skip"))
    nan = array_to_vector(F.array(*[F.lit(float("nan"))] * 5))
    cases = [
        (model.copy().setLabelCol("word"), rows, "must be a number(?s:.*)StringIndexer"),
        (model, rows.withColumn("label", F.lit(7)), r"holds 7, and the model knows the classes 0 \.\.\. 2"),
        (model, rows.withColumn("label", F.lit(float("nan"))), "1001 rows are null or NaN in column 'label'"),
        (model, rows.limit(0), "has no rows"),
        (kept, holes, "without a prediction"),
        (model, holes.withColumn("features", F.coalesce("features", nan)), "without a prediction"),
    ]
    weighed = model.copy().setWeightCol("weight")
    refused = "1001 rows are null, NaN, infinite or negative in column 'weight'"
    cases.append((weighed, rows.withColumn("weight", F.lit(float("inf"))), refused))
    cases.append((weighed, rows.withColumn("weight", F.lit(0)), "all rows have the weight 0"))
    for scorer, data, says in cases:
        with pytest.raises(ColumnError, match=says):
            scorer.evaluate(data)
    for action in (model.transform, model.evaluate, model.importance):
        with pytest.raises(ColumnError, match="no column 'features'") as caught:
            action(rows.drop("features"))
        assert [frame.name for frame in caught.traceback][-1] == "short"  # without the calls in between
    assert skipped.evaluate(holes).numInstances == holes.where("target < 0").count()
    assert "numClasses=3, numFeatures=5" in repr(model)


def test_labels_that_have_names_are_compared_by_name(rows: DataFrame, threefold: LogisticRegressionModel) -> None:
    usual = classifier(threefold)
    model = TorchClassificationModel()._with(replace(usual.trained, labels=tuple(NAMES)), None)
    by_word = model.copy({model.labelCol: "word"})
    found = by_word.evaluate(rows)
    assert found.confusionMatrix == usual.evaluate(rows).confusionMatrix
    assert found.predictions.schema["word"].dataType.simpleString() == "string"
    assert by_word.importance(rows)["importance"][0] > 0
    indexer = StringIndexer(inputCol="word", outputCol="index", stringOrderType="alphabetAsc")
    with pytest.raises(ColumnError, match=r"index 0 of column 'index' is the label 'high'.*class 0 is 'low'") as caught:
        model.copy({model.labelCol: "index"}).evaluate(indexer.fit(rows).transform(rows))
    assert "labelCol to a column of the labels themselves" in caught.value.hint
    with pytest.raises(ColumnError, match=r"holds 'new'.* 0 \.\.\. 2 \(low, middle, high\): 1001 rows"):
        by_word.evaluate(rows.withColumn("word", F.lit("new")))


def test_rows_with_nulls_and_nan_are_skipped_on_request(
    spark: SparkSession, threefold: LogisticRegressionModel, tmp_path: Path
) -> None:
    values = [0.5, 1.0, -1.0, 2.0, 0.0]
    data = spark.createDataFrame(
        [(0, values), (1, None), (2, [*values[:4], None]), (3, [*values[:4], float("nan")]), (4, values[::-1])],
        "id int, features array<double>",
    )
    model = classifier(threefold).setHandleInvalid("skip")
    assert sorted(row["id"] for row in model.transform(data).select("id", "prediction").collect()) == [0, 4]
    vectors = data.where("id != 2").withColumn(
        "features", F.when(F.col("features").isNotNull(), array_to_vector("features"))
    )
    assert sorted(row["id"] for row in model.transform(vectors).select("id", "prediction").collect()) == [0, 4]
    with pytest.raises(ConfigError, match="a result for every row") as caught:
        model.registerUDF("skips")
    assert "keep" in caught.value.hint


def test_words_come_back_through_sparks_own_stages_also_of_a_saved_pipeline(
    rows: DataFrame, validated: CrossValidatorModel, tmp_path: Path
) -> None:
    assert validated.avgMetrics[0] > 0.9
    best = validated.bestModel
    assert isinstance(best, PipelineModel)
    scored = best.transform(rows.where("word != 'middle'")).collect()
    assert {row["said"] for row in scored} == {"low", "high"}
    assert all(row["said"] == ["high", "low"][int(row["prediction"])] for row in scored)
    assert np.mean([row["said"] == row["word"] for row in scored]) > 0.9

    best.write().overwrite().save(str(tmp_path / "pipeline"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    assert loaded.stages[2].labels == ["high", "low"]  # type: ignore[attr-defined]
    assert loaded.transform(rows).schema.json() == best.transform(rows).schema.json()


def test_a_regression_of_several_values_says_why_it_has_no_figures(rows: DataFrame) -> None:
    model = TorchRegressionModel()._with(linear("regression", np.ones((2, 5)), np.zeros(2)), None)
    with pytest.raises(ConfigError, match="predicts several"):
        model.evaluate(rows)
    assert model.predict([1.0] * 5) == [5.0, 5.0]
