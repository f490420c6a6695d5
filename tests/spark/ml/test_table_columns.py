"""What a fit learns of a table's columns: integers of few values, missing numbers, and types that few tables have."""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.feature import StringIndexer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TabularClassifier, TabularRegressor
from sparktorch.errors import ColumnError
from sparktorch.ml.scoring.column_metadata import labels_of
from sparktorch.spark.column_names import ColumnNames

QUICK: dict[str, Any] = {"batchSize": 50, "learningRate": 0.01, "progress": False}
NUMBERS_ALONE: dict[str, Any] = {"maxIntegerCategories": 0}
ROWS = 400


@pytest.fixture
def months(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """Rows of which the month says, but not in order, whether the label is 1."""
    month = np.arange(ROWS) % 12 + 1
    table = pd.DataFrame(
        {
            "month": month.astype("int32"),
            "year": np.arange(ROWS) % 40 + 1980,
            "weekend": np.arange(ROWS) % 2,
            "code": (np.arange(ROWS) % 3 * 100).astype("int16"),
            "label": np.isin(month, [1, 4, 5, 9, 12]).astype(int),
        }
    )
    table.to_parquet(str(tmp_path / "months.parquet"))
    return spark.read.parquet(str(tmp_path / "months.parquet"))


def test_integers_of_few_values_are_numbers_and_categories_unless_columns_are_named(months: DataFrame) -> None:
    classifier = TabularClassifier(epochs=4, seed=1, **QUICK)
    model = classifier.fit(months)
    codes, years = {"code": [0, 100, 200]}, {"year": list(range(1980, 2020))}
    assert model.categories == {"month": list(range(1, 13)), **years, **codes}
    assert list(model.trained.preprocess.numbers) == ["month", "year", "weekend", "code"]  # type: ignore[union-attr]
    assert model.evaluate(months).areaUnderROC > 0.95
    other = months.where("month < 3").withColumn("month", F.lit(13))
    assert all(row["prediction"] is not None for row in model.transform(other).collect())
    for params, expected in (
        ({"maxIntegerCategories": 0}, {}),
        ({"maxIntegerCategories": 2}, {}),
        ({"maxIntegerCategories": 39}, {"month": list(range(1, 13)), **codes}),
        ({"minCount": 11}, {"month": list(range(1, 13)), **codes}),
        ({"categoricalCols": ["code"]}, {"code": [0, 100, 200]}),
        ({"numericCols": ["month"]}, {}),
    ):
        assert TabularClassifier(epochs=1, **params, **QUICK).fit(months).categories == expected


def test_integers_of_too_many_values_are_numbers_alone_with_the_bins_of_fewer(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = np.arange(20_000)
    table = pd.DataFrame({"many": rows % 6000, "some": rows % 3000, "label": rows / 7.0})
    table.to_parquet(str(tmp_path / "rows.parquet"))
    raw = spark.read.parquet(str(tmp_path / "rows.parquet"))
    seen, numbers = (TabularRegressor(**params, **QUICK)._learn_from(raw)[0]._learned for params in ({}, NUMBERS_ALONE))
    assert seen is not None
    assert numbers is not None
    assert {name: sorted(codes) for name, codes in seen.table.categories.items()} == {"some": list(range(3000))}
    assert not numbers.table.categories
    assert seen.edges[0] == numbers.edges[0]
    assert seen.edges[1] != numbers.edges[1]  # All of its values are known.


def test_a_label_that_only_validation_rows_have_is_told(months: DataFrame) -> None:
    named = F.when(F.col("month") == 12, "odd").when(F.col("label") == 1, "yes").otherwise("no")
    rows = months.withColumns({"label": named, "held_out": F.col("month") > 10})
    with pytest.raises(ColumnError, match="label 'odd' in validation rows, and in no row that trains"):
        TabularClassifier(validationIndicatorCol="held_out", **QUICK).fit(rows)


def rare_types() -> pa.Table:
    draw = np.random.default_rng(2)
    days = [date(1900, 1, 1) + timedelta(days=int(day)) for day in draw.integers(0, 20_000, ROWS)]
    hours = pa.array([int(hour) * 3_600_000_000 for hour in draw.integers(-200_000, 0, ROWS)])
    gone = draw.random(ROWS) < 0.1
    return pa.table(
        {
            "user": [f"user-{draw.integers(0, 150)}" for _ in range(ROWS)],
            "born": pa.array(days, mask=gone),
            "seen": hours.cast(pa.timestamp("us")),
            "known": pa.array(draw.random(ROWS) > 0.5, mask=gone),
            "price": pa.array([Decimal(f"{price:.2f}") for price in draw.normal(10, 3, ROWS)], mask=gone),
            "row": pa.array(np.arange(ROWS) + 10**12),
            "same": pa.array(np.full(ROWS, 0.1)),
            "none": pa.array([None] * ROWS, pa.float64()),
            "nothing": pa.array([None] * ROWS, pa.string()),
            "label": draw.normal(size=ROWS).astype("float32"),
        }
    )


def test_rare_types_are_learned_as_pandas_counts_them_over_many_batches(
    spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pq.write_table(rare_types(), tmp_path / "rows.parquet")
    rows, table = spark.read.parquet(str(tmp_path / "rows.parquet")), rare_types().to_pandas()
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "7")
    request.addfinalizer(lambda: spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch"))
    model = TabularRegressor(epochs=1, maxCategories=100, **QUICK).fit(rows)
    learned = model.trained.preprocess
    counts = table["user"].value_counts().reset_index().sort_values(["count", "user"], ascending=[False, True])
    assert model.categories["user"] == list(counts["user"][:100])
    assert (set(model.categories["known"]), model.categories["nothing"]) == ({True, False}, [])
    assert list(learned.numbers) == ["price", "row", "same", "none", "born", "seen"]  # type: ignore[union-attr]
    for name in ("price", "row", "same", "none"):
        centre, scale = learned.numbers[name]  # type: ignore[union-attr]
        values = table[name].astype("float64").dropna()
        if values.nunique() > 1:
            lower, median, upper = np.quantile(values, [0.25, 0.5, 0.75], method="inverted_cdf")
            np.testing.assert_allclose([centre, scale], [median, upper - lower], rtol=1e-7)
        else:
            assert scale == 0.0
    assert list(learned.missing) == ["price"]  # type: ignore[union-attr]
    row = rows.first()
    assert row is not None
    scores = [found["prediction"] for found in model.transform(rows).collect()]
    assert np.isfinite(scores).all()
    assert model.predict(row) == pytest.approx(scores[0], abs=1e-5)
    zoned = rows.withColumn("seen", F.col("seen").cast("timestamp"))
    with pytest.raises(ColumnError, match=r"cast\(`seen` as timestamp_ntz\); its time zone is then"):
        model.transform(zoned)


@pytest.mark.parametrize("name", ["late.is", "`late.is`", "s.late"])
def test_a_label_of_strings_may_have_a_dot_in_its_name_or_be_a_field(spark: SparkSession, name: str) -> None:
    rows = spark.createDataFrame([(1, "b"), (2, "a")], "n int, `late.is` string")
    rows = rows.select("n", F.struct(F.col("`late.is`").alias("late")).alias("s")) if name == "s.late" else rows
    learned, indexed = TabularClassifier(labelCol=name, inputCols=["n"])._learn_from(rows)
    names = ColumnNames.of(indexed)
    assert learned._learned.labels == ["a", "b"]
    assert labels_of(indexed, name) == ("a", "b")
    assert sorted(indexed.select("n", names.column(name)).collect()) == [(1, 1.0), (2, 0.0)]


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"inputCols": ["n", "when"], "categoricalCols": ["n"]}, "'when' is among inputCols, and in neither cat"),
        ({"inputCols": ["n", "m"], "numericCols": ["m"]}, "'n' is among inputCols, and in neither cat"),
        ({"inputCols": ["n", "late"]}, "the label 'late' is among the input columns"),
        ({"categoricalCols": ["late"]}, "the label 'late' is among the input columns"),
    ],
)
def test_an_input_column_is_neither_left_out_without_a_word_nor_the_label(
    spark: SparkSession, params: dict[str, Any], says: str
) -> None:
    rows = spark.sql("SELECT 1 AS n, 2 AS m, 'monday' AS when, 'no' AS late")
    with pytest.raises(ColumnError, match=says):
        TabularClassifier(labelCol="late", **params).fit(rows)


def test_a_label_has_as_many_classes_as_the_indexer_knows_although_no_row_has_one(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(1, "b"), (2, "c"), (3, "b"), (4, "a")], "n int, name string")
    index = StringIndexer(inputCol="name", outputCol="label", stringOrderType="alphabetAsc").fit(rows)
    indexed = index.transform(rows)
    for left_out in ("a", "c"):
        learned, some = TabularClassifier(inputCols=["n"])._learn_from(indexed.where(F.col("name") != left_out))
        assert (learned._learned.outputs, labels_of(some, "label")) == (3, ("a", "b", "c"))
    counted = indexed.select("n", F.col("label").alias("label", metadata={"ml_attr": {"num_vals": 5}}))
    assert TabularClassifier(inputCols=["n"])._learn_from(counted)[0]._learned.outputs == 5
    with pytest.raises(ColumnError, match="column 'label' has the same label in all rows that train"):
        TabularClassifier(inputCols=["n"])._learn_from(indexed.where(F.col("name") == "b"))
