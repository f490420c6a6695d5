"""Tables as they are: strings, booleans, numbers and times with nulls are trained on, scored, saved and served."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import IndexToString, SQLTransformer
from pyspark.ml.tuning import ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparktorch import (
    TabularClassificationModel,
    TabularClassifier,
    TabularRegressionModel,
    TabularRegressor,
    TorchClassifier,
    TorchCrossValidator,
)
from sparktorch.errors import ClusterError, ColumnError
from sparktorch.tasks.tables.network import TableNetwork
from sparktorch.tasks.tables.preprocess import BINS
from sparktorch.tracking import save_model
from tests.spark.scored import same_weights, sorted_rows
from tests.support.mlflow import QUIET

# Spark leaves its cross-validation thread pool open.
pool = "ignore:Exception ignored in. <function Pool:pytest.PytestUnraisableExceptionWarning"
pytestmark = [*QUIET, pytest.mark.filterwarnings(pool)]
QUICK: dict[str, Any] = {"batchSize": 16, "learningRate": 0.02, "seed": 3, "progress": False}
ROWS = 96


def flights(rows: int = ROWS) -> pd.DataFrame:
    """Flights that are late in the evening and by one carrier; a tenth of most columns is null."""
    draw = np.random.default_rng(1)
    hours, carriers = draw.integers(0, 24, rows), draw.choice(["AA", "AA", "DL", "ÜA"], rows)
    first = datetime(2024, 1, 1, tzinfo=timezone.utc)
    late = (hours > 17) | (carriers == "DL")

    def missing(values: Any) -> Any:
        return [None if gone else value for gone, value in zip(draw.random(rows) < 0.1, values, strict=True)]

    return pd.DataFrame(
        {
            "id": np.arange(rows),
            "carrier": missing(carriers),
            "international": missing(map(bool, draw.integers(0, 2, rows))),
            "seats": pd.array(missing(map(int, draw.integers(50, 300, rows))), dtype="Int32"),
            "distance": np.where(draw.random(rows) < 0.1, np.nan, draw.normal(900, 400, rows)),
            "planned": [first + timedelta(days=3 * i, hours=int(hour)) for i, hour in enumerate(hours)],
            "arrival": np.where(late, "late", "on time"),
            "held_out": np.arange(rows) % 8 == 7,
        }
    )


@pytest.fixture(scope="module")
def raw(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    path = str(tmp_path_factory.mktemp("flights") / "rows.parquet")
    flights().to_parquet(path, coerce_timestamps="us")
    return spark.read.parquet(path)


def by_hand(
    table: pd.DataFrame, bins: int
) -> tuple[list[list[int]], list[list[float]], dict[str, list[Any]], list[list[float]]]:
    """Returns both tensors as lists, the known categories, and the edges of bins, made with pandas and NumPy alone."""
    train = table[~table["held_out"]]
    known: dict[str, list[Any]] = {}
    columns = []
    for name in ("carrier", "international"):
        counts = Counter(train[name].dropna())
        known[name] = sorted(counts, key=lambda value: (-counts[value], str(value).lower()))
        places = {value: place for place, value in enumerate(known[name], 2)}
        columns.append([1 if value is None else places.get(value, 0) for value in table[name]])
    times = table["planned"].dt
    columns += [(times.month - 1 + 2).tolist(), (times.dayofweek + 2).tolist(), (times.hour + 2).tolist()]
    numbers, missing, edges = [], [], []
    planned = (table["planned"] - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(seconds=1)
    for values in (table["seats"].astype("float64"), table["distance"].astype("float64"), planned):
        seen = values[~table["held_out"]].dropna()
        lower, median, upper = np.quantile(seen, [0.25, 0.5, 0.75], method="inverted_cdf")
        shares = np.linspace(0, 1, bins // 2 + 1)
        of_rows, of_values = (np.quantile(of, shares, method="inverted_cdf") for of in (seen, seen.unique()))
        ends = np.unique([*of_rows, *of_values])
        scaled = [(of - median) / (upper - lower) for of in (values, ends)]
        column, ends = (of / np.sqrt(1 + (of / 3) ** 2) for of in scaled)
        numbers.append(column.fillna(0.0).tolist())
        edges.append(ends.astype(np.float32).tolist())
        missing.append(values.isna().astype(float).tolist())
    numbers += missing[:2]
    tensors = [list(row) for row in zip(*columns, strict=True)], [list(row) for row in zip(*numbers, strict=True)]
    return *tensors, known, edges


def test_a_table_trains_as_tensors_made_by_hand_and_scores_wherever_the_model_goes(
    spark: SparkSession, raw: DataFrame, tmp_path: Path
) -> None:
    shared = {"idCol": "id", "validationIndicatorCol": "held_out", "epochs": 6, "numWorkers": 2, **QUICK}
    model = TabularClassifier(labelCol="arrival", **shared).fit(raw)
    table = flights()
    network = dict(model.trained.params)
    categories, numbers, known, edges = by_hand(table, bins=BINS)
    assert {name: model.categories[name] for name in known} == known
    assert model.labels == ["late", "on time"]

    labels = [float(label == "on time") for label in table["arrival"]]
    rows = list(zip(range(ROWS), categories, numbers, labels, table["held_out"].tolist(), strict=True))
    kinds = "id long, categories array<long>, numbers array<float>, label double, held_out boolean"
    assert network["members"] > 1
    network |= {"cardinalities": [5, 4, 14, 9, 26], "numbers": 5, "outputs": 2, "edges": edges}
    penalty = {"weight_decay": 2 / int((~table["held_out"]).sum()), "decoupled_weight_decay": False}
    expected = TorchClassifier(
        module=TableNetwork,
        moduleParams=network,
        inputCols=["categories", "numbers"],
        optimizer="Adam",
        optimizerParams={"weight_decay": 0.01, "decoupled_weight_decay": True},
        parameterGroups=[{"params": "embeddings.*", **penalty}],
        **shared,
    ).fit(spark.createDataFrame(rows, kinds))
    for found, wanted in zip(model.module.parameters(), expected.module.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert model.summary.history[-1]["val_loss"] == pytest.approx(expected.summary.history[-1]["val_loss"], abs=1e-5)

    unseen = raw.where("id < 4").withColumns({"id": F.col("id") + ROWS, "carrier": F.lit("new")})
    empty = unseen.select(
        (F.col("id") + ROWS).alias("id"), *(F.lit(None).cast(t).alias(n) for n, t in raw.dtypes if n != "id")
    )
    every = raw.unionByName(unseen).unionByName(empty)
    scored = sorted_rows(model.transform(every), "id")
    scores = np.array([row["probability"].toArray() for row in scored])
    assert np.isfinite(scores).all()
    texts = IndexToString(inputCol="prediction", outputCol="said").transform(model.transform(every))
    right = [row["said"] == row["arrival"] for row in sorted_rows(texts, "id")[:ROWS]]
    summary = model.evaluate(raw)
    assert summary.accuracy == pytest.approx(np.mean(right))
    assert summary.accuracy > 0.8

    model.save(str(tmp_path / "model"))
    loaded = TabularClassificationModel.load(str(tmp_path / "model"))
    assert loaded.trained.preprocess == model.trained.preprocess
    assert [row["probability"] for row in sorted_rows(loaded.transform(every), "id")] == [
        row["probability"] for row in scored
    ]
    kept = loaded.copy({loaded.handleInvalid: "skip"}).transform(every)
    assert len(kept.collect()) == ROWS + 8
    inputs = [spec.column for spec in loaded.trained.inputs]
    loaded.registerUDF("lateness", "probability")
    every.createOrReplaceTempView("flights")
    found = sorted_rows(spark.sql(f"select id, lateness({', '.join(inputs)}) p from flights"), "id")
    np.testing.assert_allclose([row["p"] for row in found], scores, atol=1e-6)
    np.testing.assert_allclose(loaded.predictProbability(scored[-1].asDict()).toArray(), scores[-1], atol=1e-6)

    save_model(loaded, str(tmp_path / "mlflow"))
    served = mlflow.pyfunc.load_model(str(tmp_path / "mlflow"))
    answers = served.predict(table[inputs])
    np.testing.assert_allclose(np.stack(answers["probability"]), scores[:ROWS], atol=1e-6)
    texts = table[inputs].assign(planned=[None if pd.isna(at) else at.isoformat() for at in table["planned"]])
    answers = served.predict(texts)  # as JSON has times
    np.testing.assert_allclose(np.stack(answers["probability"]), scores[:ROWS], atol=1e-6)


class Told(nn.Module):
    """A module of a user's own that is told how many categories and numbers there are."""

    def __init__(self, cardinalities: list[int], numbers: int, width: int) -> None:
        super().__init__()
        self.cardinalities, self.numbers = cardinalities, numbers
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in cardinalities)
        self.out = nn.Linear(width + numbers, 1)

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        places = enumerate(self.tables)
        embedded = torch.stack([table(categories[:, place]) for place, table in places]).sum(0)
        return self.out(torch.cat([embedded, numbers], 1)).squeeze(1)


def test_a_model_that_goes_on_counts_the_rows_for_the_penalty_of_its_categories(raw: DataFrame) -> None:
    anew = TabularClassifier(labelCol="arrival", epochs=1, **QUICK)
    again = TabularClassifier(labelCol="arrival", epochs=1, module=anew.fit(raw), **QUICK)
    penalties = [one._learn_from(raw)[0].completed().getParameterGroups() for one in (anew, again)]
    assert [group["weight_decay"] for group in penalties[0]] == [2 / ROWS]
    assert penalties[0] == penalties[1]


def test_what_is_learned_of_a_table_does_not_depend_on_its_partitions(spark: SparkSession) -> None:
    rows = spark.range(3_000).select(
        F.sin("id").alias("wave"),
        (F.col("id") % 700).alias("cycle"),
        F.when(F.col("id") % 3 > 0, F.col("id") % 2).alias("flag"),
        F.timestamp_seconds(F.col("id") * 7_000).alias("at"),
        (F.col("id") % 2).cast("int").alias("label"),
    )
    seen = [TabularClassifier(**QUICK)._learn(rows.repartition(count)) for count in (1, 7)]
    assert seen[0] == seen[1]
    assert [len(edges) for edges in seen[0].edges][2] == 2


def test_a_number_without_variation_is_named_and_has_no_effect(
    raw: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    rows = raw.select("carrier", F.lit(3.0).alias("same"), F.lit(None).cast("double").alias("never"), "arrival")
    with caplog.at_level("WARNING", logger="sparktorch"):
        model = TabularClassifier(labelCol="arrival", **QUICK).fit(rows)
    assert "without effect: 'same', 'never'" in caplog.text
    other = rows.withColumns({"same": F.lit(-1e6), "never": F.lit(1e6)})
    before, after = ([row["probability"] for row in model.transform(of).collect()] for of in (rows, other))
    assert before == after


def test_a_regressor_takes_named_columns_rare_categories_as_unknown_and_a_module_of_ones_own(
    raw: DataFrame, tmp_path: Path
) -> None:
    own = {"module": Told, "moduleParams": {"width": 3}, "minCount": 20, "maxCategories": 1}
    named = {"categoricalCols": ["carrier", "seats"], "numericCols": ["international"], "labelCol": "id"}
    regressor = TabularRegressor(**own, **named, **QUICK)
    model = regressor.fit(raw)
    assert model.categories == {"carrier": ["AA"], "seats": []}
    assert (model.module.cardinalities, model.module.numbers) == ([3, 2], 2)
    model.save(str(tmp_path / "model"))
    loaded = TabularRegressionModel.load(str(tmp_path / "model"))
    assert not any(np.isnan(row["prediction"]) for row in loaded.transform(raw).collect())
    again = TabularRegressor(module=model, epochs=1, **named, **QUICK).fit(raw.where("carrier = 'DL'"))
    assert again.categories == model.categories
    with regressor.prepare(raw) as prepared:
        held = regressor.fit(prepared, {regressor.learningRate: 0.01})
        assert same_weights(held, regressor.copy({regressor.learningRate: 0.01}).fit(raw))
    with pytest.raises(ColumnError, match=r"no column 'carier'.*\n.*carrier") as refused:
        regressor.copy({regressor.categoricalCols: ["carier"]}).fit(raw)
    assert refused.value.where["param"] == "categoricalCols"
    with pytest.raises(ColumnError, match="'both' is array<string>, neither text"):
        TabularRegressor(labelCol="id", **QUICK).fit(raw.withColumn("both", F.array("carrier")))


def test_folds_learn_of_their_own_rows(raw: DataFrame) -> None:
    rows = raw.select("carrier", "planned", (F.col("arrival") == "late").cast("int").alias("label"))
    classifier = TabularClassifier(epochs=2, **QUICK)
    pipeline = Pipeline(stages=[SQLTransformer(statement="SELECT * FROM __THIS__"), classifier])
    grid = ParamGridBuilder().addGrid(classifier.moduleParams, [{"hidden": [4]}]).build()
    for estimator in (classifier, pipeline):
        validator = TorchCrossValidator(
            estimator=estimator, estimatorParamMaps=grid, evaluator=BinaryClassificationEvaluator(), numFolds=2, seed=1
        )
        found = validator.fit(rows)
        assert len(found.avgMetrics) == 1
        best = found.bestModel.stages[-1] if estimator is pipeline else found.bestModel
        assert list(best.categories) == ["carrier", "planned.month", "planned.weekday", "planned.hour"]
        assert best.labels == []


def test_labels_of_any_size_are_learned_and_the_order_of_columns_is_the_users(
    spark: SparkSession, tmp_path: Path
) -> None:
    lines = [f"{i % 10},{'ab'[i % 2]},{1_000_000 + 200_000 * (i % 10)},{i % 3 + 1}" for i in range(200)]
    (tmp_path / "prices.csv").write_text("\n".join(["size,kind,price,rating", *lines]))
    prices = spark.read.csv(str(tmp_path / "prices.csv"), header=True, inferSchema=True)
    chosen: dict[str, Any] = {"batchSize": 20, "learningRate": 0.01, "progress": False}
    model = TabularRegressor(labelCol="price", inputCols=["size", "kind"], epochs=20, **chosen).fit(prices)
    assert model.getInputCols() == ["size", "kind"]
    assert model.evaluate(prices).r2 > 0.99
    assert model.trained.params["nonnegative"] == [0]
    with pytest.raises(ColumnError, match=r"labels 1 \.\.\. 3, and classes are counted from 0"):
        TabularClassifier(labelCol="rating", **chosen).fit(prices)
    with pytest.raises(ColumnError, match="the same label in all rows"):
        TabularClassifier(labelCol="kind", **chosen).fit(prices.where("kind = 'a'"))
    with pytest.raises(ColumnError, match="'size' must be boolean"):
        TabularClassifier(labelCol="kind", validationIndicatorCol="size", **chosen).fit(prices)
    with pytest.raises(ColumnError, match="'size' is in categoricalCols and in numericCols"):
        TabularClassifier(labelCol="kind", categoricalCols=["size"], numericCols=["size"], **chosen).fit(prices)
    kinds = TabularClassifier(labelCol="kind", **chosen).fit(prices)
    with pytest.raises(ColumnError, match=r"holds 'c'.* 0 \.\.\. 1 \(a, b\): 200 rows have no label"):
        kinds.evaluate(prices.withColumn("kind", F.lit("c")))
    with pytest.raises(ColumnError, match="no rows that train"):
        TabularClassifier(labelCol="kind", **chosen).fit(prices.where("size > 10"))
    with pytest.raises(ColumnError, match="'kind' is not among inputCols"):
        TabularRegressor(labelCol="price", inputCols=["size"], categoricalCols=["kind"], **chosen).fit(prices)


def test_more_labels_than_a_network_has_outputs_for_are_refused(
    raw: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparktorch.tasks.tables.learned._MOST_LABELS", 1)
    with pytest.raises(ColumnError, match=r"column 'arrival' has more than 1 labels(.|\n)*identifiers"):
        TabularClassifier(labelCol="arrival", **QUICK).fit(raw)


def test_executors_that_lack_a_module_are_told_with_how_to_ship_it(raw: DataFrame) -> None:
    def lacks(batches: Any) -> Any:
        raise ModuleNotFoundError("No module named 'sparktorch'")

    rows = raw.mapInArrow(lacks, raw.schema)
    with pytest.raises(ClusterError, match=r"No module named 'sparktorch'(.|\n)*--py-files"):
        TabularClassifier(labelCol="arrival", **QUICK).fit(rows)
