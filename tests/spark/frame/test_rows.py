"""What a column of an unexpected type or value is met with, and which rows have keys of their own."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch.data.columns import InputOptions
from sparktorch.errors import ColumnError
from sparktorch.spark.frame.encoding import input_columns
from sparktorch.spark.frame.prepare import Frame, prepare
from sparktorch.spark.scoring_udf import without_invalid
from tests.support.sessions import settings


def framed(data: DataFrame, *inputs: str, **options: Any) -> Frame:
    return prepare(data, "generic", inputs=inputs, label=None, options=InputOptions(**options))


@pytest.mark.parametrize(
    ("column", "roles", "says"),
    [
        ("'cat'", {"label": "x"}, ["cast(x as double)", "StringIndexer(inputCol='x', outputCol='x_index').fit(df)"]),
        ("1", {"label": "y", "validation": "x"}, ["must be boolean, but is int", "cast(x as boolean)"]),
        ("'1'", {"label": "y", "weight": "x"}, ["must be a number, but is string", "cast(x as double)"]),
        ("current_timestamp()", {"inputs": ["x"], "label": "y"}, ["timestampdiff", "128 s", "preprocess"]),
    ],
)
def test_a_first_error_says_what_to_write_instead(
    spark: SparkSession, column: str, roles: dict[str, Any], says: list[str]
) -> None:
    data = spark.range(1).select(F.expr(column).alias("x"), F.lit(1.0).alias("y"))
    with pytest.raises(ColumnError) as caught:
        prepare(data, "classification", **{"inputs": ["y"], **roles})
    for text in says:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "rows", "options"),
    [
        ("array<array<string>>", [[["a"], ["b", "c"]], [["a", "b"], ["c"]], [["a", "b", "c"]]], {}),
        ("struct<a:array<int>,b:array<int>>", [([1], [2, 3]), ([1, 2], [3])], {}),
        ("struct<a:int,b:int>", [(1, None), (None, 1), None, (None, None)], {"fill": 0.0}),
        ("array<int>", [[1, None], [None, 1], [1], [], None], {"fill": 0.0}),
        ("array<struct<a:int,b:string>>", [[(1, None)], [(1, None), None], [None, (1, None)], None], {"fill": 0.0}),
    ],
)
def test_rows_that_shape_or_nulls_alone_tell_apart_have_keys_of_their_own(
    spark: SparkSession, kind: str, rows: list[Any], options: dict[str, Any]
) -> None:
    data = spark.createDataFrame([(row,) for row in rows], f"x {kind}")
    found = framed(data, "x", as_they_are=True, **options).data.collect()
    assert len({row["k"] for row in found}) == len(rows)


def test_a_key_is_the_number_that_it_has_always_been(spark: SparkSession) -> None:
    data = spark.range(1).selectExpr(
        "2f as a",
        "array(1f, null) as l",
        "array(array(1f), array(cast(null as float))) as n",
        "cast(null as float) as b",
        "'t' as t",
    )
    before = {
        ("a", "l", "n"): "a, isnull(a), l, isnull(l), transform(l, x -> isnull(x)), n, isnull(n), "
        "transform(n, x -> struct(isnull(x), transform(x, y -> isnull(y))))",
        ("a",): "a, isnull(a)",
    }
    for inputs, hashed in before.items():
        (key,) = [
            row["k"]
            for row in framed(data, *inputs, fill=0.0, shapes={"n": (2, 1)} if "n" in inputs else {}).data.collect()
        ]
        assert key == data.selectExpr(f"xxhash64({hashed})").first()[0]
    packed = framed(data, "a", "b", fill=0.0, assemble=True).data.first()["k"]
    array = "array(a, b)"
    assert packed == data.selectExpr(f"xxhash64({array}, false, transform({array}, x -> isnull(x)))").first()[0]
    words = data.selectExpr("array(t, t) as w", "named_struct('a', t, 'b', a) as s")
    key = framed(words, "w", "s", as_they_are=True).data.first()["k"]
    assert key == words.selectExpr("xxhash64(size(w), w, s)").first()[0]


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_what_an_integer_dtype_cannot_hold_is_for_the_null_policy(spark: SparkSession, ansi: str) -> None:
    data = spark.sql("select explode(array(double('NaN'), 3e9D, 7D)) as x")
    data = data.selectExpr("x", "array(1D, x) l", "named_struct('f', x) s")
    dtypes = {"x": "int32", "l": "int32", "s.f": "int64"}
    with settings(spark, {"spark.sql.ansi.enabled": ansi}):
        frame = framed(data.coalesce(1), "x", "l", "s.f", dtypes=dtypes)
        found = [(row["x0"], row["x1"], row["x2"]) for row in frame.data.collect()]
        assert found == [(None, [1, None], None), (None, [1, None], 3_000_000_000), (7, [1, 7], 7)]
        # A model that was fitted on whole numbers scores others.
        whole = data.selectExpr("int(1) as x", "bigint(2) as y")
        fitted = framed(whole, "x", "y", assemble=True), framed(whole, "x", as_they_are=True)
        specs = [spec for frame in fitted for spec in frame.columns.inputs]
        scored = data.selectExpr("x", "bigint(1) as y").select(*input_columns(data.withColumn("y", F.lit(1)), specs))
        assert [tuple(row) for row in scored.collect()] == [([None, 1], None), ([3_000_000_000, 1], None), ([7, 1], 7)]
        limits = data.selectExpr("array(-128.5D, -129D, x) a", "array(-pow(2D, 63), pow(2D, 63), x) b")
        lists = whole.selectExpr("array(x, x, x) as a", "array(x, x, x) as b")
        of_lists = framed(lists, "a", "b", dtypes={"a": "int8", "b": "int64"}).columns.inputs
        vectors = limits.select(array_to_vector("a").alias("a"), array_to_vector("b").alias("b"))
        rows = vectors.select(*input_columns(vectors, of_lists)).collect()
        assert [row["x0"]["values"] for row in rows] == [[-128, None, None], [-128, None, None], [-128, None, 7]]
        assert [row["x1"]["values"] for row in rows] == [[-(2**63), None, x] for x in (None, 3_000_000_000, 7)]


@pytest.mark.parametrize("options", [{}, {"assemble": True}, {"as_they_are": True}])
def test_text_in_place_of_whole_numbers_is_cast_to_their_own_type(spark: SparkSession, options: dict[str, Any]) -> None:
    data = spark.sql("select 9007199254740993L as x")
    inputs = framed(data, "x", **options).columns.inputs
    text = data.selectExpr("string(x) as x")
    with pytest.raises(ColumnError) as caught:
        input_columns(text, inputs)
    (cast,) = re.findall(r"cast\(.*\)", str(caught.value.hint))
    (value,) = text.selectExpr(f"{cast} as x").select(*input_columns(data, inputs)).first()
    assert value in (9007199254740993, [9007199254740993])


def test_a_timestamp_among_the_columns_of_a_callable_is_shown_as_ranks_get_it(spark: SparkSession) -> None:
    nested = "named_struct('u', array(timestamp_seconds(1))) s"
    data = spark.sql(f"select timestamp_seconds(86400.5) t, {nested}, timestamp_ntz'2024-01-02 03:04:05' n")
    sample = framed(data, "t", "s", "n", as_they_are=True).sample
    assert sample.column("x0").cast("int64").to_pylist() == [86_400_500_000]
    assert str(sample.column("x1")[0].as_py()["u"][0]) == "1970-01-01 00:00:01+00:00"
    assert str(sample.column("x2")[0].as_py()) == "2024-01-02 03:04:05"


def test_wide_tables_are_checked_without_overflowing_the_stack_of_the_jvm(spark: SparkSession) -> None:
    names = [f"i{place}" for place in range(400)]
    data = spark.range(1, 3).coalesce(1).select(*[F.col("id").alias(name) for name in names], F.lit(0.5).alias("f"))
    assert framed(data, *names, "f", assemble=True).data.first()["x0"] == [1.0] * 400 + [0.5]
    inputs = framed(data, *names, drop=True).columns.inputs
    assert without_invalid(data, input_columns(data, inputs), inputs).head()["i0"] == 1


def test_ids_that_packing_with_floats_would_merge_are_refused_by_name(spark: SparkSession) -> None:
    data = spark.sql("select explode(array(16777216L, 16777217L)) as id, 0.5D as f").coalesce(1)
    found = framed(data.limit(1), "id", "f", assemble=True)
    assert found.data.first()["x0"] == [16777216.0, 0.5]
    with pytest.raises(ColumnError, match="column 'id' holds whole numbers beyond 2\\^24") as caught:
        framed(data.where("id > 16777216"), "id", "f", assemble=True)
    with pytest.raises(ColumnError, match="column 'id' holds whole numbers beyond 2\\^24"):
        framed(data.selectExpr("cast(id as decimal(20)) + 1 as id", "f"), "id", "f", assemble=True)
    assert "cast it to double" in caught.value.hint
    assert framed(data.selectExpr("double(id) id", "f"), "id", "f", assemble=True).data.collect()
    labelled = prepare(
        data.where("id > 16777216"), "regression", inputs=["f"], label=["id", "f"], options=InputOptions()
    )
    assert labelled.data.collect()  # the targets of a training are rounded as one of them is
