"""Rankings: groups stay whole from the DataFrame to the loss, and their metrics are scikit-learn's."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from optuna.samplers import GridSampler
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn.metrics import ndcg_score
from torch import nn

from sparktorch import Ranker, RankingModel, TorchEstimator, TorchRegressor, TorchTuner
from sparktorch.errors import ColumnError, ConfigError, RankError
from sparktorch.tracking import save_model
from tests.support.mlflow import QUIET

pytestmark = QUIET
LINEAR = {"module": "torch.nn:Linear", "moduleParams": {"in_features": 2, "out_features": 1}}
QUICK: dict[str, Any] = {**LINEAR, "batchSize": 8, "epochs": 12, "learningRate": 0.05, "seed": 3, "progress": False}


def searches(count: int = 60) -> pd.DataFrame:
    """Hotels that searches find: within a search, the cheaper is the better, and dear cities have better hotels."""
    draw = np.random.default_rng(4)
    found = []
    for number, size in enumerate(draw.integers(1, 25, count)):
        level = draw.normal()
        price = draw.normal(size=size)
        taste = price - 0.7 * draw.normal(size=size)
        grade = np.digitize(2 * level - taste, [-1.0, 0.5, 1.5, 2.5]).astype(float)
        features = np.stack([price + 3 * level, draw.normal(size=size)], 1)
        for row, label in zip(features.tolist(), grade.tolist(), strict=True):
            found.append((f"search {number}", row, label, 1.0 + number % 3, number % 4 == 0))
    return pd.DataFrame(found, columns=["search", "features", "label", "weight", "held_out"])


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    schema = "search string, features array<float>, label double, weight double, held_out boolean"
    data = spark.createDataFrame(searches(), schema).repartition(4).cache()
    yield data
    data.unpersist()


@pytest.fixture(scope="module")
def model(rows: DataFrame) -> RankingModel:
    return ranker(weightCol="weight", validationIndicatorCol="held_out", numWorkers=2).fit(rows)


def ranker(**params: Any) -> Ranker:
    return Ranker(**{**QUICK, "groupCol": "search", **params})


def ndcg_of(scored: DataFrame | pd.DataFrame, k: int | None = None, *, weighted: bool = False) -> float:
    """Returns the mean by scikit-learn, which refuses groups of one row."""
    found, weights = [], []
    for _, group in (scored if isinstance(scored, pd.DataFrame) else scored.toPandas()).groupby("search"):
        alone = float(group.label.iloc[0] > 0)
        found.append(ndcg_score([group.label], [group.prediction], k=k) if len(group) > 1 else alone)
        weights.append(group.weight.iloc[0] if weighted else 1.0)
    return float(np.average(found, weights=weights))


def test_a_ranking_is_better_than_that_of_a_regression_and_than_chance(rows: DataFrame) -> None:
    train, test = rows.where("not held_out"), rows.where("held_out")
    by_value = ndcg_of(TorchRegressor(**QUICK).fit(train).transform(test))
    by_chance = ndcg_of(test.withColumn("prediction", F.rand(1)))
    for loss in ("listnet", "lambdarank"):
        assert ndcg_of(ranker(loss=loss).fit(train).transform(test)) > max(by_value, by_chance) + 0.1


def test_evaluate_has_the_figures_of_scikit_learn_and_validation_those_of_evaluate(
    rows: DataFrame, model: RankingModel
) -> None:
    test = rows.where("held_out")
    summary, scored = model.evaluate(test), model.transform(test)
    for k in (None, 1, 3, 10):
        assert summary.ndcg(k) == pytest.approx(ndcg_of(scored, k, weighted=True), abs=1e-6)
    last = model.summary.history[-1]
    assert last["val_ndcg_at_10"] == pytest.approx(summary.ndcg(10), abs=1e-5)
    assert last["val_mrr"] == pytest.approx(summary.meanReciprocalRank, abs=1e-5)
    assert (summary.numGroups, summary.numInstances) == (15, test.count())
    assert model.copy({model.predictionCol: ""}).evaluate(test).ndcg(10) == pytest.approx(summary.ndcg(10))


def test_equal_scores_share_their_gains_and_come_behind_rows_without_a_grade(spark: SparkSession) -> None:
    given = [("a", [0.0, 0.0], 3.0), ("a", [0.0, 0.0], 0.0), ("a", [1.0, 0.0], 1.0), ("b", [0.0, 0.0], 0.0)]
    few = spark.createDataFrame(given, "search string, features array<float>, label double")
    weights = {"weight": torch.tensor([[1.0, 0.0]]), "bias": torch.zeros(1)}
    model = RankingModel.fromModule(nn.Linear, few, moduleParams=LINEAR["moduleParams"], weights=weights)
    summary = model.setGroupCol("search").evaluate(few)
    assert summary.ndcg() == pytest.approx(ndcg_score([[3, 0, 1]], [[0, 0, 1]]) / 2)
    assert summary.meanReciprocalRank == 0.5


def offers(spark: SparkSession, count: int = 70) -> DataFrame:
    """Offers that searches find, as a table has them: the cheaper is the better, and some kinds may cost more."""
    draw = np.random.default_rng(5)
    rows: list[tuple[Any, ...]] = []
    for search in range(count):
        for size in range(int(draw.integers(2, 9))):
            price, kind = float(draw.uniform(10, 90)), ["hotel", "flat", "tent", None][int(draw.integers(4))]
            value = {"hotel": 40, "flat": 20, "tent": 0, None: 10}[kind] - price
            since = datetime.date(2026, 1 + size, 1)
            grade = float(np.digitize(value, [-60, -40, -20]))
            rows.append(
                (f"search {search}", kind, price if draw.random() < 0.9 else None, 3 * search % 7, since, grade)
            )
    schema = "search string, kind string, price double, rooms int, since date, grade double"
    return spark.createDataFrame(rows, schema).repartition(3)


NAMED: dict[str, Any] = {"groupCol": "search", "labelCol": "grade", "progress": False, "seed": 2}
SMALL: dict[str, Any] = {**NAMED, "moduleParams": {"hidden": [8]}, "batchSize": 10, "epochs": 3}


def test_a_ranker_takes_a_table_as_it_is_with_nothing_named_but_columns(spark: SparkSession, tmp_path: Path) -> None:
    rows = offers(spark)
    model = Ranker(**NAMED, earlyStoppingPatience=2).fit(rows)  # A long patience takes seconds.
    assert model.getInputCols() == ["kind", "price", "rooms", "since"]
    assert set(model.categories["kind"]) == {"hotel", "flat", "tent"}
    assert model.summary.heldOut["unit"] == "groups"
    scored = model.transform(rows).toPandas().rename(columns={"grade": "label"})
    by_chance = ndcg_of(scored.assign(prediction=np.random.default_rng(1).random(len(scored))))
    summary = model.evaluate(rows)
    assert summary.ndcg() > max(0.95, by_chance + 0.05)
    assert summary.ndcg() == pytest.approx(ndcg_of(scored), abs=1e-6)
    model.write().overwrite().save(str(tmp_path / "model"))
    again, row = RankingModel.load(str(tmp_path / "model")), rows.where("kind is null and price is null").first()
    assert again.predict(row) == model.predict(row)
    assert again.categories == model.categories


def test_several_members_are_trained_alike_by_any_number_of_workers(spark: SparkSession) -> None:
    rows = offers(spark, 30)
    fitted = [Ranker(**{**SMALL, "optimizer": "SGD", "numWorkers": count}).fit(rows) for count in (1, 3)]
    plain, other = (model.module.state_dict() for model in fitted)
    assert fitted[0].module.members > 1
    torch.testing.assert_close(other, plain, atol=1e-6, rtol=0)


def test_a_loss_of_ones_own_gets_one_score_a_row_of_the_network_for_tables(spark: SparkSession) -> None:
    def spread(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        assert scores.shape == labels.shape == (int(sizes.sum()),)
        return torch.stack([part.var(correction=0) for part in scores.split(sizes.tolist())])

    assert Ranker(**SMALL, loss=spread).fit(offers(spark, 30)).module.members == 1


def test_rows_without_a_group_are_not_learned_of_and_the_network_may_be_named_by_its_path(spark: SparkSession) -> None:
    nameless = F.when(F.col("kind") != "tent", F.col("search"))
    rows = offers(spark, 20).withColumns({"search": nameless, "key": F.col("rooms") + (1 << 60)})
    kept = rows.where("search is not null")
    ranker = Ranker(**SMALL, module="sparktorch.tasks.tables.network:TableNetwork", nullPolicy="drop")
    learned, _ = ranker._learn_from(rows)
    assert learned._learned is not None
    assert learned._learned.rows == kept.count()
    model = ranker.fit(rows)
    assert set(model.categories["kind"]) == {"hotel", "flat"}
    assert "key" not in model.categories
    assert np.isfinite(model.transform(rows).toPandas().prediction).all()
    with pytest.raises(ColumnError, match="must be a number for Ranker, but is string"):
        Ranker(**SMALL).fit(rows.withColumn("grade", F.col("grade").cast("string")))


def test_a_ranker_of_a_table_refuses_columns_that_cannot_be_inputs_and_a_group_that_is_not_there(
    spark: SparkSession,
) -> None:
    rows = offers(spark, 3)
    with pytest.raises(ColumnError, match="there is no column 'nope'"):
        Ranker(**{**SMALL, "groupCol": "nope"}).fit(rows)
    with pytest.raises(ColumnError, match="column 'places' is array<int>, neither text, number, boolean"):
        Ranker(**SMALL).fit(rows.withColumn("places", F.array(F.lit(1))))
    with pytest.raises(ConfigError, match="module is not set"):
        Ranker(**SMALL, featuresCol="places").fit(rows)


@pytest.mark.parametrize(
    "changes",
    [{"search": "monotonically_increasing_id()"}, {"grade": "2.0"}, {"grade": "0.0"}, {"grade": "hash(search) & 1"}],
    ids=["groups of one", "one grade", "no grade above 0", "one grade in each group"],
)
def test_groups_that_teach_nothing_give_a_model_and_never_nan(spark: SparkSession, changes: dict[str, str]) -> None:
    rows = offers(spark, 12).selectExpr("*").withColumns({name: F.expr(text) for name, text in changes.items()})
    model = Ranker(**SMALL).fit(rows)
    assert np.isfinite(model.transform(rows).toPandas().prediction).all()
    assert np.isfinite([record["loss"] for record in model.summary.history]).all()
    assert 0 <= model.evaluate(rows).ndcg(10) <= 1


def test_a_model_scores_row_by_row_once_loaded_in_sql_and_in_mlflow(
    rows: DataFrame, model: RankingModel, tmp_path: Path
) -> None:
    scored = model.transform(rows.limit(20)).toPandas()
    model.write().overwrite().save(str(tmp_path / "model"))
    again = RankingModel.load(str(tmp_path / "model"))
    assert again.getGroupCol() == "search"
    assert [again.predict(row) for row in scored.features] == pytest.approx(list(scored.prediction), abs=1e-6)
    again.registerUDF("ranking")
    in_sql = rows.sparkSession.createDataFrame(scored[["features"]]).selectExpr("ranking(features) found").toPandas()
    assert list(in_sql.found) == pytest.approx(list(scored.prediction), abs=1e-6)
    save_model(model, str(tmp_path / "mlflow"))
    loaded = mlflow.pyfunc.load_model(str(tmp_path / "mlflow"))
    shuffled = scored[["features"]].sample(frac=1, random_state=0)
    in_order = loaded.predict(shuffled).prediction.loc[scored.index]  # rows keep their index
    assert list(in_order) == pytest.approx(list(scored.prediction), abs=1e-6)


def test_a_loss_of_ones_own_gets_whole_groups_and_estimators_of_any_module_too(rows: DataFrame) -> None:
    def spread(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.var(correction=0) for part in scores.view(-1).split(sizes.tolist())])

    for kind in (Ranker, TorchEstimator):
        found = kind(**{**QUICK, "epochs": 2}, loss=spread, groupCol="search", numWorkers=2).fit(rows)
        first, last = (record["loss"] for record in found.summary.history)
        assert 0 < last < first


def test_a_tuner_judges_trials_by_their_ranking(rows: DataFrame) -> None:
    tuner = TorchTuner(
        estimator=ranker(epochs=3, validationIndicatorCol="held_out", earlyStoppingMetric="val_ndcg_at_10"),
        space={"learningRate": [1e-6, 0.1]},
        trials=2,
        parallelism=1,
        metric="val_ndcg_at_10",
        sampler=GridSampler({"learningRate": [1e-6, 0.1]}, seed=1),
    )
    assert tuner.fit(rows).bestParams == {"learningRate": 0.1}


def test_a_group_that_outweighs_a_workers_share_is_told(rows: DataFrame, caplog: pytest.LogCaptureFixture) -> None:
    most = rows.withColumn("search", F.when(F.col("label") < 3, "every").otherwise(F.col("search")))
    with caplog.at_level(logging.WARNING, "sparktorch"):
        ranker(epochs=1, numWorkers=2).fit(most)
    assert "rows, more than a worker's share: groups are not divided" in caplog.text


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"groupCol": "nope"}, "there is no column 'nope'"),
        ({"moduleParams": {"in_features": 2, "out_features": 3}}, "a ranker's module returns one score a row"),
    ],
)
def test_what_cannot_rank_is_refused_before_a_job(rows: DataFrame, params: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ColumnError, ValueError), match=message):
        ranker(**params).fit(rows)


def test_rows_that_cannot_be_ranked_are_refused(rows: DataFrame, model: RankingModel) -> None:
    negative = rows.withColumn("label", F.col("label") - 1)
    nameless = rows.withColumn("search", F.when(F.col("label") < 3, F.col("search")))
    for bad, message in ((negative, "negative"), (nameless, "column 'search' has .* null")):
        with pytest.raises((ColumnError, RankError), match=message):
            ranker().fit(bad)
    for bad, message in ((negative, "below 0"), (nameless, "null in column 'search'")):
        with pytest.raises(ColumnError, match=message):
            model.evaluate(bad)
    mixed = rows.withColumn("held_out", F.col("label") > 2)
    with pytest.raises(ColumnError, match="column 'held_out' marks some rows of a group"):
        ranker(validationIndicatorCol="held_out").fit(mixed)
