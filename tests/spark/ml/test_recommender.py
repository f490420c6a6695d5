"""Users and items of any ids: rated, ranked, saved and served, in the forms of Spark's ALS."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from pyspark.ml.evaluation import RankingEvaluator, RegressionEvaluator
from pyspark.ml.recommendation import ALS, ALSModel
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import Recommender, RecommenderModel
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.tracking import save_model
from tests.support.mlflow import QUIET

# Spark leaves its cross-validation thread pool open.
pool = "ignore:Exception ignored in. <function Pool:pytest.PytestUnraisableExceptionWarning"
pytestmark = [*QUIET, pytest.mark.filterwarnings(pool)]
USERS, ITEMS = 12, 9
QUICK: dict[str, Any] = {"rank": 3, "batchSize": 8, "learningRate": 0.2, "seed": 3, "progress": False}


def table() -> pd.DataFrame:
    draw = np.random.default_rng(2)
    seen = draw.random((USERS, ITEMS)) < 0.7
    likes = draw.normal(size=(USERS, 2)) @ draw.normal(size=(2, ITEMS))
    number, item = np.nonzero(seen)
    return pd.DataFrame(
        {
            "who": [f"user-{n:02d}" for n in number],
            "number": number.astype(np.int32),
            "item": item.astype(np.int32),
            "stars": (3 + likes[seen]).astype(np.float32),
            "age": 20.0 + number,
            "price": 2.0 * item,
            "held_out": draw.random(len(item)) < 0.15,
        }
    )


@pytest.fixture(scope="module")
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    path = str(tmp_path_factory.mktemp("ratings") / "rows.parquet")
    table().to_parquet(path)
    return spark.read.parquet(path)


@pytest.fixture(scope="module")
def als(rows: DataFrame) -> ALSModel:
    return ALS(userCol="number", itemCol="item", ratingCol="stars", rank=3, maxIter=3, seed=1).fit(rows)


@pytest.fixture(scope="module")
def model(rows: DataFrame) -> RecommenderModel:
    estimator = Recommender(
        userCol="who", ratingCol="stars", epochs=40, regParam=0.01, numWorkers=2, validationIndicatorCol="held_out"
    )
    found: RecommenderModel = estimator.setParams(**QUICK).fit(rows)
    return found


def lists_of(found: DataFrame) -> dict[Any, list[tuple[Any, float]]]:
    return {row[0]: [tuple(pair) for pair in row[1]] for row in found.collect()}


def assert_same_lists(found: DataFrame, expected: DataFrame) -> None:
    assert found.schema.simpleString() == expected.schema.simpleString()
    ours, theirs = lists_of(found), lists_of(expected)
    assert ours.keys() == theirs.keys()
    for key, pairs in ours.items():
        np.testing.assert_allclose([r for _, r in pairs], [r for _, r in theirs[key]], atol=1e-5)
        assert [item for item, _ in pairs] == [item for item, _ in theirs[key]]


def test_vectors_of_several_lengths_are_refused_by_the_argument_that_has_them(als: ALSModel) -> None:
    ragged = als.userFactors.withColumn("features", F.expr("slice(features, 1, 1 + int(id % 2))"))
    with pytest.raises(ConfigError, match=r"several lengths \[param=userFactors\]"):
        RecommenderModel.fromFactors(ragged, als.itemFactors, userCol="number")


def test_lists_and_predictions_of_vectors_of_als_are_those_of_als(rows: DataFrame, als: ALSModel) -> None:
    ours = RecommenderModel.fromFactors(als.userFactors, als.itemFactors, userCol="number")
    assert ours.rank == als.rank == 3
    some = rows.where("number < 4 and item < 5").unionByName(rows.where("number = 1").withColumn("number", F.lit(77)))
    assert_same_lists(ours.recommendForAllUsers(4), als.recommendForAllUsers(4))
    assert_same_lists(ours.recommendForAllItems(50), als.recommendForAllItems(50))
    assert_same_lists(ours.recommendForUserSubset(some, 2), als.recommendForUserSubset(some, 2))
    assert_same_lists(ours.recommendForItemSubset(some, 2), als.recommendForItemSubset(some, 2))
    for strategy in ("nan", "drop"):
        ours.setColdStartStrategy(strategy)
        als.setColdStartStrategy(strategy)
        found, expected = ours.transform(some), als.transform(some)
        assert found.schema["prediction"].dataType == expected.schema["prediction"].dataType
        left, right = (frame.select("number", "item", "prediction").toPandas() for frame in (found, expected))
        by = ["number", "item"]
        left, right = left.sort_values(by, ignore_index=True), right.sort_values(by, ignore_index=True)
        pd.testing.assert_frame_equal(left, right, atol=1e-5)
        assert left["prediction"].isna().any() == (strategy == "nan")


def test_factors_give_the_predictions_by_a_product(rows: DataFrame, model: RecommenderModel) -> None:
    users, items = model.userFactors.toDF("who", "u"), model.itemFactors.toDF("item", "i")
    assert [field.simpleString() for field in (*users.schema, *items.schema)] == [
        *("who:string", "u:array<float>", "item:int", "i:array<float>")
    ]
    scored = model.transform(rows.where("not held_out")).join(users, "who").join(items, "item").toPandas()
    products = [np.dot(u, i) for u, i in zip(scored["u"], scored["i"], strict=True)]
    np.testing.assert_allclose(products, scored["prediction"], atol=1e-5)
    assert np.sqrt(np.mean((scored["prediction"] - scored["stars"]) ** 2)) < 0.3
    assert model.summary.history[-1]["val_loss"] < 2


def test_pairs_that_users_have_are_left_out_and_lists_are_as_short_as_that_makes_them(
    rows: DataFrame, model: RecommenderModel
) -> None:
    have = {(row["who"], row["item"]) for row in rows.collect()}
    every = lists_of(model.recommendForAllUsers(ITEMS))
    found = lists_of(model.recommendForAllUsers(ITEMS, exclude=rows))
    assert len(found) == USERS
    for who, pairs in found.items():
        assert pairs == [pair for pair in every[who] if (who, pair[0]) not in have]


def test_metrics_of_lists_are_those_of_spark(rows: DataFrame, als: ALSModel) -> None:
    ours = RecommenderModel.fromFactors(als.userFactors, als.itemFactors, userCol="number")
    liked = rows.where("stars > 3.2")
    relevant = liked.groupBy("number").agg(F.collect_list(F.col("item").cast("double")).alias("label"))
    lists = als.recommendForAllUsers(4).selectExpr("number", "cast(recommendations.item as array<double>) prediction")
    joined = lists.join(relevant, "number")
    found = ours.evaluate(liked, k=4)
    for name, value in zip(("ndcgAtK", "precisionAtK", "recallAtK"), found, strict=False):
        assert value == pytest.approx(RankingEvaluator(metricName=name, k=4).evaluate(joined), abs=1e-9), name
    assert found.users == joined.count()


def test_lists_of_no_user_that_the_fit_had_have_no_metrics(rows: DataFrame, model: RecommenderModel) -> None:
    for none in (rows.withColumn("who", F.lit("a stranger")), rows.withColumn("item", F.lit(None).cast("int"))):
        with pytest.raises(ColumnError, match="column 'who' has no user that the fit had"):
            model.evaluate(none)


def test_a_saved_model_scores_in_sql_in_mlflow_and_row_by_row(
    spark: SparkSession, rows: DataFrame, model: RecommenderModel, tmp_path: Path
) -> None:
    model.save(str(tmp_path / "model"))
    loaded = RecommenderModel.load(str(tmp_path / "model"))
    assert loaded.trained.preprocess == model.trained.preprocess
    assert_same_lists(loaded.recommendForAllUsers(3), model.recommendForAllUsers(3))
    known = table()[["who", "item"]]
    scored = model.transform(spark.createDataFrame(known)).toPandas()
    loaded.registerUDF("stars")
    spark.createDataFrame(known).createOrReplaceTempView("pairs")
    found = spark.sql("select who, item, stars(who, item) prediction from pairs").toPandas()
    by = ["who", "item"]
    expected = scored.sort_values(by, ignore_index=True)
    pd.testing.assert_frame_equal(found.sort_values(by, ignore_index=True), expected, atol=1e-6)
    assert loaded.predict(known.iloc[0].to_dict()) == pytest.approx(scored["prediction"][0], abs=1e-6)

    save_model(model, str(tmp_path / "mlflow"))
    served = mlflow.pyfunc.load_model(str(tmp_path / "mlflow"))
    new = pd.concat([known.head(3), pd.DataFrame({"who": ["nobody"], "item": [0]})]).astype({"item": "int32"})
    answers = served.predict(new)["prediction"]
    assert answers.index.equals(new.index)
    np.testing.assert_allclose(answers.iloc[:3], scored["prediction"][:3], atol=1e-6)
    assert np.isnan(answers.iloc[3])


def test_features_score_users_and_items_that_the_fit_did_not_have(spark: SparkSession, rows: DataFrame) -> None:
    estimator = Recommender(
        userCol="who", implicitPrefs=True, ratingCol="stars", userFeatures=["age"], itemFeatures=["price"], epochs=2
    ).setParams(numNegatives=4, moduleParams={"hidden": [4]}, **QUICK)
    model = estimator.fit(rows.where("stars > 0"))
    pairs = [("user-03", 1, 23.0, 2.0), ("new", 1, 23.0, 2.0), ("new", 1000, 50.0, 2.0)]
    scored = model.transform(spark.createDataFrame(pairs, "who string, item int, age double, price double")).toPandas()
    assert scored["prediction"].notna().all()
    assert scored["prediction"].nunique() == 3
    lists = lists_of(model.recommendForUserSubset(rows.where("who = 'user-03'"), ITEMS))
    assert dict(lists["user-03"])[1] == pytest.approx(scored["prediction"][0], abs=1e-5)


def cross_entropy(model: RecommenderModel, chosen: DataFrame) -> float:
    """Returns the mean cross-entropy of choices among all items, weighted by 1 + log(1 + the rating)."""
    users, items = (
        factors.orderBy("id").toPandas().set_index("id") for factors in (model.userFactors, model.itemFactors)
    )
    rows = chosen.toPandas()
    scores = np.stack(users["features"][rows["who"]]) @ np.stack(items["features"]).T
    target = scores[np.arange(len(rows)), items.index.get_indexer(rows["item"])]
    return float(np.average(np.log(np.exp(scores).sum(1)) - target, weights=1 + np.log1p(rows["stars"])))


def test_choices_are_trained_user_by_user_whatever_part_of_them_is_held_out(rows: DataFrame) -> None:
    estimator = Recommender(userCol="who", ratingCol="stars", implicitPrefs=True, epochs=3, numWorkers=2)
    chosen = rows.where("stars > 0")
    model = estimator.setParams(**QUICK).fit(chosen)
    assert (model.summary.rows, model.summary.heldOut) == (USERS, {})
    marked = estimator.copy().setValidationIndicatorCol("held_out").fit(chosen)
    held_out = chosen.where("held_out").select("who").distinct().count()
    assert marked.summary.validationRows == held_out > 0
    assert marked.summary.history[-1]["val_loss"] == pytest.approx(cross_entropy(marked, chosen.where("held_out")))
    again = estimator.copy().setNumWorkers(1).fit(chosen.repartition(5))
    ours, other = (one.userFactors.orderBy("id").toPandas()["features"] for one in (model, again))
    np.testing.assert_allclose(np.stack(ours), np.stack(other), atol=1e-6)


def test_choices_below_zero_are_refused_also_among_marked_rows(rows: DataFrame) -> None:
    estimator = Recommender(userCol="who", ratingCol="stars", implicitPrefs=True, **QUICK)
    with pytest.raises(ColumnError, match="column 'stars' has ratings below 0"):
        estimator.fit(rows.withColumn("stars", F.col("stars") - 4))
    negative = rows.withColumn("stars", F.when(F.col("held_out"), -1.0).otherwise(1.0))
    with pytest.raises(ColumnError, match="column 'stars' has ratings below 0"):
        estimator.setValidationIndicatorCol("held_out")._learn_from(negative)


def test_a_row_that_is_dropped_counts_for_nothing_in_the_weight_of_its_user(spark: SparkSession) -> None:
    nan, inf = float("nan"), float("inf")
    less, more = math.exp(1.0) - 1, math.exp(3.0) - 1  # They weigh 3 and 7.
    pairs = [("a", 1, more, 1.0), ("a", 2, nan, 1.0), ("a", 3, inf, 1.0), ("a", 4, None, 1.0), ("a", None, 7.0, 1.0)]
    pairs += [("a", 5, 7.0, nan), ("a", 6, 7.0, None), ("b", 1, less, 1.0), ("b", 2, 0.0, 1.0)]
    some = spark.createDataFrame(pairs, "user string, item int, rating double, age double")
    estimator = Recommender(implicitPrefs=True, alpha=2.0, userFeatures=["age"], nullPolicy="drop")
    learned, arranged = estimator._learn_from(some)
    assert learned.completed().getWeightCol() == "_weight"
    weights = {row["user"]: row["_weight"] for row in arranged.select("user", "_weight").collect()}
    assert weights == pytest.approx({"a": 7.0, "b": 3.0})


def test_a_rating_that_is_no_number_is_refused_by_its_column_where_items_are_drawn(rows: DataFrame) -> None:
    estimator = Recommender(userCol="who", ratingCol="stars", implicitPrefs=True, numNegatives=2, epochs=1, **QUICK)
    positive = rows.where("stars > 0")
    _, arranged = estimator._learn_from(positive)
    weights = arranged.select("stars").toPandas()["stars"]
    np.testing.assert_allclose(sorted(weights), sorted(1 + np.log1p(positive.toPandas()["stars"])), rtol=1e-6)
    for unfit in (None, float("nan")):
        some = positive.withColumn("stars", F.when(F.col("item") < 7, F.col("stars")).otherwise(F.lit(unfit)))
        with pytest.raises(ColumnError, match="'stars'"):
            estimator.fit(some)


def test_equal_ratings_have_a_baseline_of_zero_and_are_learned_without_a_scale(rows: DataFrame) -> None:
    equal = rows.withColumn("stars", F.lit(0.1).cast("float"))
    estimator = Recommender(userCol="who", ratingCol="stars", validationIndicatorCol="held_out", **QUICK)
    learned, _ = estimator._learn_from(equal)
    assert learned._chosen()["baseline"] == {"val_loss": 0.0}
    assert learned.completed().getModuleParams()["scale"] == 1.0


def test_ratings_in_another_unit_are_learned_alike_and_compared_with_their_mean(rows: DataFrame) -> None:
    estimator = Recommender(
        userCol="who", ratingCol="stars", epochs=5, validationIndicatorCol="held_out", idCol="pair", **QUICK
    )
    rows = rows.withColumn("pair", F.concat("who", "item"))  # the same batches, whatever the ratings are
    model = estimator.fit(rows)
    larger = estimator.fit(rows.withColumn("stars", 50 + 20 * F.col("stars")))
    ours, theirs = (one.transform(rows).orderBy("who", "item").toPandas()["prediction"] for one in (model, larger))
    np.testing.assert_allclose(50 + 20 * ours, theirs, rtol=1e-3)
    deviation = rows.where("not held_out").select(F.stddev_pop("stars")).first()[0]
    assert model.summary.baseline["val_loss"] == pytest.approx(deviation**2, rel=1e-4)


def test_cross_validation_learns_the_ids_of_each_fold(rows: DataFrame) -> None:
    estimator = Recommender(userCol="number", ratingCol="stars", coldStartStrategy="drop", epochs=2, **QUICK)
    grid = ParamGridBuilder().addGrid(estimator.rank, [2, 4]).build()
    judge = RegressionEvaluator(labelCol="stars", metricName="rmse")
    found = CrossValidator(estimator=estimator, estimatorParamMaps=grid, evaluator=judge, numFolds=2).fit(rows)
    assert np.isfinite(found.avgMetrics).all()
    assert found.bestModel.rank in (2, 4)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"itemCol": "price"}, "column 'price' is double, and users and items are"),
        ({"ratingCol": "starz"}, "no column 'starz'"),
        ({"ratingCol": "who2"}, "column 'who2' must be a number"),
        ({"itemCol": "who"}, "column 'who' has two roles"),
        ({"itemFeatures": ["Stars"]}, "column 'stars' has two roles"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_before_a_training(
    rows: DataFrame, params: dict[str, Any], said: str
) -> None:
    with pytest.raises((ColumnError, ConfigError), match=said):
        Recommender(**{"userCol": "who", "ratingCol": "stars", **QUICK, **params}).fit(
            rows.withColumn("who2", F.col("who"))
        )


@pytest.mark.parametrize("column", ["who", "item", "stars"])
def test_a_null_names_its_column(rows: DataFrame, column: str) -> None:
    some = rows.withColumn(column, F.when(F.col("price") < 14, F.col(column)))
    with pytest.raises(ColumnError, match=f"'{column}'"):
        Recommender(userCol="who", ratingCol="stars", **QUICK).fit(some)
    dropped = Recommender(userCol="who", ratingCol="stars", nullPolicy="drop", **QUICK).fit(some)
    assert len(dropped.trained.preprocess.items) == 7
