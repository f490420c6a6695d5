"""Fits without settings: which rows are held out, when they end, and that any number of workers trains the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import (
    Callback,
    Forecaster,
    Ranker,
    Recommender,
    TabularClassificationModel,
    TabularClassifier,
    TabularRegressor,
    TorchRegressor,
    TorchTuner,
)
from sparktorch.cli.job_file import DataSection
from sparktorch.errors import ColumnError, ConfigError, SparkTorchError
from sparktorch.tasks.shared.held_out import Sample, in_share

LINEAR = {"module": "torch.nn:Linear", "moduleParams": {"in_features": 1, "out_features": 1}}
SMALL: dict[str, Any] = {"moduleParams": {"hidden": [8]}, "progress": False}


class FailsAt(Callback):
    """Raises at the end of an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_end(self, context: Any, record: dict[str, Any]) -> None:
        if context.epoch == self.epoch:
            raise RuntimeError("the end of the test's epoch")


@pytest.fixture(scope="module")
def customers(spark: SparkSession) -> DataFrame:
    """600 rows, of which 40 % have left: the sooner, the shorter their contract."""
    draw = np.random.default_rng(3)
    months, plan = draw.exponential(20.0, 600), draw.integers(0, 3, 600)
    left = months + 15 * plan + draw.normal(0, 6, 600) < 25
    rows = [
        (place, float(month), "abc"[at], "yes" if gone else "no")
        for place, (month, at, gone) in enumerate(zip(months, plan, left, strict=True))
    ]
    return spark.createDataFrame(rows, "id int, months double, plan string, gone string").repartition(4).cache()


def weights(model: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = model.module.state_dict()
    return state


def test_a_table_without_settings_is_told_apart_and_the_training_ends_by_itself_also_once_it_goes_on(
    customers: DataFrame, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    classifier = TabularClassifier(labelCol="gone", idCol="id", **SMALL)
    with caplog.at_level(logging.INFO, "sparktorch"):
        model = classifier.fit(customers)
    summary = model.summary
    assert "batchSize 32, learningRate 0.003, at most" in caplog.text
    assert summary.ended.startswith("patience: 12 validations without a better val_loss")
    assert summary.best["val_accuracy"] > summary.baseline["val_accuracy"] + 0.1
    assert summary.settings["batchSize"] == 32
    assert summary.heldOut == {"samples": summary.validationRows, "unit": "rows", "by": "a hash of 'id'"}
    assert 30 < summary.validationRows < 90
    assert summary.rows + summary.validationRows == 600
    assert "patience: 12" in summary._repr_html_()

    model.save(str(tmp_path / "model"))
    loaded = TabularClassificationModel.load(str(tmp_path / "model"))
    assert loaded.summary.to_dict() == summary.to_dict()
    classifier.save(str(tmp_path / "estimator"))
    assert TabularClassifier.load(str(tmp_path / "estimator")).getEpochs() == "auto"

    checked = classifier.copy().setParams(checkpointDir=str(tmp_path / "checkpoints"))
    with pytest.raises(SparkTorchError, match="the end of the test's epoch"):
        checked.copy().setParams(callbacks=[FailsAt(4)]).fit(customers)
    again = checked.setParams(numWorkers=2).fit(customers.repartition(3))
    assert len(again.summary.history) == len(summary.history)
    assert again.summary.fingerprint == summary.fingerprint


def test_any_number_of_workers_holds_out_the_same_rows_and_trains_the_same(customers: DataFrame) -> None:
    rows = customers.drop("id")
    share = {"labelCol": "gone", "epochs": 2, "validationFraction": 0.2, **SMALL}
    one, *others = [
        TabularClassifier(**share, numWorkers=number).fit(rows.repartition(number + 1)) for number in (1, 2, 3)
    ]
    assert 70 < one.summary.validationRows < 170
    assert (one.summary.settings["epochs"], one.summary.ended) == (2, "all epochs")
    for other in others:
        assert other.summary.fingerprint == one.summary.fingerprint
        assert other.summary.validationRows == one.summary.validationRows
        for name, tensor in weights(one).items():
            torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-6, atol=1e-6)


def test_of_equal_rows_a_share_is_held_out_in_any_partitioning(spark: SparkSession) -> None:
    students = spark.range(2_400).select(
        F.when(F.col("id") % 2 == 0, "male").otherwise("female").alias("Gender"),
        F.concat(F.lit("ABCDEF").substr((F.col("id") % 6 + 1).cast("int"), F.lit(1)), F.lit("")).alias("Dept"),
        (F.floor(F.col("id") / 12) % 2).cast("int").alias("admitted"),
        (F.col("id") % 7).alias("weight"),
    )
    estimator = TabularClassifier(labelCol="admitted", weightCol="weight", progress=False)
    marks = [estimator._learn_from(students.repartition(count))[1].toPandas() for count in (1, 5)]
    shares = [rows.groupby(["Gender", "Dept", "admitted"])["_held_out"].mean() for rows in marks]
    assert len(shares[0]) == 12
    assert 0.02 < shares[0].min() <= shares[0].max() < 0.25
    counted = [rows.value_counts().sort_index() for rows in marks]
    assert counted[0].equals(counted[1])
    _, held_out = DataSection(path="rows.parquet", holdout=0.2).split(students)
    assert len(held_out.select("Gender", "Dept", "admitted").distinct().collect()) == 12
    assert held_out.columns == students.columns


def test_a_label_that_only_held_out_rows_have_is_learned(customers: DataFrame) -> None:
    held_out = customers.where(in_share([F.col("id")], 0.1)).first()
    assert held_out is not None
    gone = F.when(F.col("id") == held_out["id"], "who knows").otherwise(F.col("gone"))
    learned, rows = TabularClassifier(labelCol="gone", idCol="id")._learn_from(customers.withColumn("gone", gone))
    assert learned._learned.labels == ["no", "who knows", "yes"]
    kept = [row["id"] for row in rows.where("_held_out").collect()]
    assert held_out["id"] in kept
    assert learned._sample.held_out == len(kept)
    numbers = customers.withColumn("gone", F.when(F.col("id") == held_out["id"], 2).otherwise(F.col("id") % 2))
    assert TabularClassifier(labelCol="gone", idCol="id")._learn_from(numbers)[0]._learned.outputs == 3


def test_the_fits_of_a_search_or_of_prepared_rows_hold_out_the_same(customers: DataFrame) -> None:
    soon = {"labelCol": "gone", "earlyStoppingPatience": 1, **SMALL}
    classifier = TabularClassifier(**soon)
    maps = [{classifier.learningRate: rate} for rate in (0.001, 0.01)]
    models = [model for _, model in sorted(classifier.fitMultiple(customers, maps), key=lambda pair: pair[0])]
    with classifier.prepare(customers) as rows:
        models.append(classifier.fit(rows))
        models.append(classifier.fit(rows, {classifier.epochs: 1}))
    tuner = TorchTuner(estimator=classifier, space={"learningRate": [0.001, 0.01], "epochs": [1, 2]}, trials=2)
    tuned = tuner.fit(customers)
    models.append(tuned.bestModel)
    assert len({(model.summary.validationRows, model.summary.fingerprint) for model in models}) == 1
    assert models[0].summary.validationRows > 0
    assert models[0].summary.ended.startswith("patience: 1 ")
    assert len(models[3].summary.history) == 1
    assert "ddp" in str(classifier.plan(customers))


class PrunesAll(optuna.pruners.BasePruner):
    def prune(self, study: Any, trial: Any) -> bool:
        return True


def test_a_search_without_a_space_begins_with_the_default_settings_which_no_pruner_ends(customers: DataFrame) -> None:
    classifier = TabularClassifier(labelCol="gone", earlyStoppingPatience=1, **SMALL)
    tuned = TorchTuner(estimator=classifier, trials=3, pruner=PrunesAll(), parallelism=1).fit(customers)
    assert tuned.trials["state"].tolist() == ["COMPLETE", "PRUNED", "PRUNED"]
    assert tuned.bestParams == {}
    assert "params_learningRate" in tuned.trials
    assert "params_moduleParams.hidden" not in tuned.trials
    expected = weights(classifier.fit(customers))
    assert all(torch.equal(expected[name], value) for name, value in weights(tuned.bestModel).items())


def test_a_search_by_validation_of_too_few_rows_is_refused_before_it_trains(customers: DataFrame) -> None:
    tuner = TorchTuner(estimator=TabularRegressor(labelCol="months", **SMALL), trials=5, parallelism=1)
    with pytest.raises(ConfigError, match="the rows are too few to hold some out") as caught:
        tuner.fit(customers.limit(12).drop("gone"))
    assert "validationIndicatorCol" in caught.value.hint


def test_rows_without_a_label_are_neither_counted_nor_learned_of_nor_evaluated_where_they_are_dropped(
    customers: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    unlabelled = F.col("id") % 4 == 0
    rows = customers.select(
        *("id", "months", F.when(unlabelled, "z").otherwise(F.col("plan")).alias("plan")),
        F.when(~unlabelled, F.col("gone")).alias("gone"),
    )
    few: dict[str, Any] = {"labelCol": "gone", "idCol": "id", "earlyStoppingPatience": 1}
    with caplog.at_level(logging.INFO, "sparktorch"):
        model = TabularClassifier(nullPolicy="drop", **few, **SMALL).fit(rows)
    held_out = model.summary.validationRows
    assert model.summary.droppedRows == 150
    assert f"{450 - held_out} rows train, {held_out} are held out" in caplog.text
    assert set(model.categories["plan"]) == {"a", "b", "c"}
    assert model.evaluate(rows).numInstances == 450
    with pytest.raises(ColumnError, match="150 rows are null or NaN in column 'gone'"):
        model.copy({model.nullPolicy: "error"}).evaluate(rows)


def test_few_rows_all_train_for_some_hundred_steps(customers: DataFrame) -> None:
    model = TabularRegressor(labelCol="months", **SMALL).fit(customers.limit(12).drop("gone").coalesce(1))
    assert (model.summary.rows, model.summary.validationRows, model.summary.heldOut) == (12, 0, {})
    assert model.summary.totalIterations == 400
    constant = customers.select("plan", F.lit(7.0).alias("months"))
    model = TabularRegressor(labelCol="months", **SMALL).fit(constant)
    assert model.predict({"plan": "a"}) == pytest.approx(7.0, abs=0.1)
    with pytest.raises(ColumnError, match="has the same label in all rows that train"):
        TabularClassifier(labelCol="gone", **SMALL).fit(customers.where("gone = 'yes'"))


def test_series_hold_out_their_last_windows(spark: SparkSession) -> None:
    draw = np.random.default_rng(1)
    rows = [(shop, day, float(10 * shop + day % 7 + draw.normal() / 3)) for shop in range(4) for day in range(90)]
    sales = spark.createDataFrame([*rows, (9, 1, 1.0)], "shop int, day int, sold double").repartition(3)
    named = {"orderCol": "day", "labelCol": "sold", "context": 14, "horizon": 7, "progress": False}
    forecaster = Forecaster(groupCol="shop", **named)
    model = forecaster.fit(sales)
    assert model.summary.heldOut == {"samples": 28, "unit": "windows", "by": "time, the last ones of each series"}
    assert (model.summary.rows, model.summary.validationRows) == (4 * (70 - 7 - 6), 28)
    assert model.summary.totalIterations >= 1000
    assert model.evaluate(sales.where("shop < 9"), season=7).meanAbsoluteScaledError < 1.0
    alone = Forecaster(**named).fit(sales.where("shop = 1 and day < 30"))
    assert (alone.summary.rows, alone.summary.validationRows) == (10, 0)
    asking = Forecaster(**named, earlyStoppingPatience=3)._learn_from(sales.where("shop = 1 and day < 40"))[0]
    assert asking._sample == Sample(trained=12, held_out=2, chosen_by=forecaster._chosen_by)
    seasons = [Forecaster(**named, season=season)._learn_from(sales.where("shop = 1"))[0] for season in (3, 7)]
    assert seasons[0]._differing(seasons[1]) == ["season"]  # The start of one is not that of the other.
    with pytest.raises(ColumnError, match="no group has 21 rows"):
        Forecaster(**named).fit(sales.where("shop = 1 and day < 20"))


def test_ratings_hold_out_rows_of_users_and_items_with_several(spark: SparkSession) -> None:
    draw = np.random.default_rng(2)
    pairs = [(user, item) for user in range(60) for item in range(20)]
    rows = [(f"u{user}", item, float(3 + np.sin(user) + np.cos(item) + draw.normal() / 9)) for user, item in pairs]
    rows += [(f"once{place}", 0, 3.0) for place in range(50)]
    ratings = spark.createDataFrame(rows, "user string, item int, rating float").repartition(3)
    learned, marked = Recommender()._learn_from(ratings)
    held_out = marked.where("_held_out")
    assert held_out.where("user like 'once%'").count() == 0
    assert 80 < held_out.count() < 160
    assert len(learned._learned.users) == 110
    model = Recommender(progress=False, regParam=0.01).fit(ratings)
    assert model.summary.settings["earlyStoppingPatience"] < model.summary.settings["epochs"] == 8
    assert model.summary.best["val_loss"] < 0.9


def test_a_ranker_holds_out_whole_groups(spark: SparkSession) -> None:
    rows = [(query, [float(place % 5)], float(place % 5)) for query in range(120) for place in range(5)]
    found = spark.createDataFrame(rows, "query int, features array<float>, label float").repartition(3)
    ranker = Ranker(**LINEAR, groupCol="query", earlyStoppingPatience=2, progress=False)
    model = ranker.fit(found)
    assert model.summary.heldOut["unit"] == "groups"
    assert model.summary.validationRows == model.summary.heldOut["samples"] > 0
    one = Ranker(**LINEAR, groupCol="query", progress=False).fit(found.where("query = 1"))
    assert (one.summary.rows, one.summary.totalIterations) == (1, 400)


def test_a_module_of_the_users_keeps_its_epoch_and_a_warning_says_how_few_steps_it_took(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    rows = spark.createDataFrame([([float(n)], float(n)) for n in range(20)], "features array<float>, label float")

    def said() -> list[str]:
        return [text for text in caplog.messages if "epochs is not set" in text]

    model = TorchRegressor(**LINEAR, progress=False).fit(rows)
    assert (len(model.summary.history), model.summary.ended) == (1, "all epochs")
    assert said() == [
        "the fit took 1 step in 1 epoch of batchSize 256, and epochs is not set: set it, so that the training takes "
        "some hundred steps; with validationIndicatorCol and earlyStoppingPatience it ends by itself"
    ]
    TorchRegressor(**LINEAR, epochs=1, progress=False).fit(rows)
    assert len(said()) == 1
