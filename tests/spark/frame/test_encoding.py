"""What the driver sends and looks at: types as they travel, and the first row that shows what there is to see."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch.data.columns import InputOptions
from sparktorch.errors import ColumnError, ConfigError, SparkTorchError
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import input_columns, plan_inputs
from sparktorch.spark.frame.prepare import Frame, prepare


def framed(data: DataFrame, *inputs: str, **options: Any) -> Frame:
    return prepare(data, "regression", inputs=inputs, label="y", options=InputOptions(**options))


def shown(found: Frame) -> list[Any]:
    return [found.sample.column(spec.name)[0].as_py() for spec in found.columns.inputs]


def rows_of(spark: SparkSession, schema: str, *rows: Any) -> DataFrame:
    return spark.createDataFrame([(*row, 1.0) for row in rows], f"{schema}, y float").coalesce(1)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("schema", "bad", "good"),
    [
        ("x float", [None, NAN, INF, -INF], 1.0),
        ("x array<float>", [None, [1.0, None], [NAN, 1.0], [1.0, -INF]], [1.0, 2.0]),
        ("x array<array<double>>", [[None], [[NAN]], [[None]], [[1.0], [INF]]], [[1.0]]),
    ],
)
def test_a_row_that_is_left_out_is_not_looked_at(spark: SparkSession, schema: str, bad: list[Any], good: Any) -> None:
    data = rows_of(spark, schema, *[(value,) for value in [*bad, good]])
    assert shown(framed(data, "x", drop=True)) == [good]


def test_a_vector_or_a_label_that_is_left_out_is_not_looked_at(spark: SparkSession) -> None:
    vectors = [Vectors.dense(NAN, 1.0), Vectors.sparse(2, [(1, INF)]), Vectors.dense(1.0, 2.0), Vectors.dense(3.0, 4.0)]
    data = spark.createDataFrame(list(zip(vectors, [0.0, 0.0, NAN, 1.0], strict=True)), ["x", "y"]).coalesce(1)
    assert shown(framed(data, "x", drop=True))[0]["values"] == [3.0, 4.0]
    with pytest.raises(ColumnError, match="no row without nulls, NaN, infinity or empty lists"):
        framed(data.limit(2), "x", drop=True)


def test_where_nulls_are_filled_every_column_may_have_one_in_every_row(spark: SparkSession) -> None:
    data = rows_of(spark, "a float, b float, c array<float>", (None, 1.0, None), (2.0, None, [None, 1.0]))
    assert shown(framed(data, "a", "b", fill=0.0)) == [None, 1.0]
    found = framed(data, "a", "b", "c", fill=0.0)
    assert (shown(found), found.columns.inputs[2].shape) == ([2.0, None, [None, 1.0]], (2,))
    found = framed(data, "a", "c", fill=0.0, shapes={"c": (2, 1)})
    assert (shown(found), found.columns.inputs[1].shape) == ([None, None], (2, 1))
    holed = rows_of(spark, "x array<array<float>>", ([[1.0], None],), ([[1.0], [None]],))
    assert shown(framed(holed, "x", fill=0.0)) == [[[1.0], [None]]]
    labels = data.withColumn("y", F.expr("if(a is null, null, y)"))
    assert shown(framed(labels, "a", fill=0.0)) == [2.0]


def test_an_empty_first_row_hides_nothing_that_the_next_one_shows(spark: SparkSession) -> None:
    data = rows_of(spark, "x array<array<float>>", ([],), ([[1.0, 2.0]],))
    padded = {"layouts": {"x": "padded"}}
    assert framed(data, "x", **padded).columns.inputs[0].shape == (2,)
    found = framed(data, "x", shapes={"x": (2, 1)}, **padded).columns.inputs[0]
    assert (found.shape, found.levels) == ((2, 1), (2,))
    with pytest.raises(ColumnError, match="no row without"):
        framed(data.where(F.size("x") == 0), "x", **padded)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("bigint", {"fill": 0.5}, "fillValue is 0.5, which column 'x', int64, cannot hold"),
        ("int", {"fill": 0.5, "assemble": True}, "column 'x', int64"),
        ("float", {"fill": 1e39}, "column 'x', float32"),
        ("boolean", {"fill": 2, "as_they_are": True}, "column 'x', bool"),
    ],
)
def test_a_filling_that_a_column_cannot_hold_is_refused(
    spark: SparkSession, kind: str, options: dict[str, Any], says: str
) -> None:
    data = spark.range(1).select(F.lit(None).cast(kind).alias("x"), F.lit(1.0).alias("y"))
    with pytest.raises(ConfigError) as caught:
        plan_inputs(ColumnNames.of(data), ["x"], InputOptions(**options))
    assert says in caught.value.what
    assert caught.value.where == {"param": "fillValue"}


@pytest.mark.parametrize(
    ("value", "options", "kind", "says"),
    [
        ("binary('a')", {}, ColumnError, ["is binary", "inputLayouts={'x': 'image'}", "'raw'"]),
        ("map('a', 1)", {"as_they_are": True}, ColumnError, ["is map<string,int>", "x['key']"]),
        ("binary('a')", {"layouts": {"x": "raw"}}, ConfigError, ["nothing says what its bytes are"]),
        ("array(1)", {"layouts": {"x": "sparse_csr"}}, ConfigError, ["cannot be 'sparse_csr'", "'padded'"]),
        ("array(1)", {"limits": {"x": 2}}, ConfigError, ["maxLengths names 'x'", "'padded'"]),
        ("array(1)", {"shapes": {"y": (2,)}}, ConfigError, ["inputShapes 'y' is unknown", "valid names: x"]),
        ("array(1, 2)", {"shapes": {"x": (3,)}}, ColumnError, ["holds 2 values, inputShapes says [3]"]),
        ("binary('a')", {"layouts": {"x": "image"}, "shapes": {"x": (9, 9)}}, ConfigError, ["an image is"]),
        ("cast(array() as array<int>)", {}, ColumnError, ["'x' is empty in the first row"]),
        ("1", {"assemble": True, "dtypes": {"x": "int32"}}, ConfigError, ["assembleInputs packs"]),
    ],
)
def test_what_cannot_become_a_tensor_is_refused_on_the_driver(
    spark: SparkSession, value: str, options: dict[str, Any], kind: type[SparkTorchError], says: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        framed(spark.range(1).select(F.expr(value).alias("x"), F.lit(1.0).alias("y")), "x", **options)
    for text in says:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("value", "sql", "expected"),
    [
        ("named_struct('my-field', 1, 'b', 'x')", "struct<`my-field`:int,b:string>", {"my-field": 1, "b": "x"}),
        ("array(named_struct('a b', 1.5BD))", "array<struct<`a b`:double>>", [{"a b": 1.5}]),
    ],
)
def test_what_is_nested_travels_as_it_is_and_decimals_as_doubles(
    spark: SparkSession, value: str, sql: str, expected: Any
) -> None:
    data = spark.range(1).select(F.expr(value).alias("x"), F.lit(1.0).alias("y"))
    found = framed(data, "x", as_they_are=True)
    assert found.columns.inputs[0].sql == sql
    assert shown(found) == [expected]
    assert len(found.data.collect()) == 1


def test_columns_are_found_by_path_in_any_case_and_with_dots_in_their_names(spark: SparkSession) -> None:
    who = "named_struct('x', float(id), 'y', id * 2f, 'w', 1, 'V', id = 3) as Who"
    data = spark.range(12).selectExpr("id", who, "float(id) as `a.b`", "id * 2f as y")
    roles = {"label": "Who.y", "weight": "who.w", "validation": "who.v", "key": "ID"}
    nested = prepare(data, "regression", inputs=["who.x", "A.B"], **roles)
    flat = data.selectExpr("float(id) x", "float(id) b", "id * 2f y", "1 w", "id = 3 v", "id")
    roles = {"label": "y", "weight": "w", "validation": "v", "key": "id"}
    assert nested.data.collect() == prepare(flat, "regression", inputs=["x", "b"], **roles).data.collect()
    assert [spec.column for spec in nested.columns.inputs] == ["who.x", "A.B"]
    scored = data.select(*input_columns(data, nested.columns.inputs)).collect()
    assert scored == nested.data.select("x0", "x1").collect()
    twice = data.join(data.withColumnRenamed("id", "key"), F.col("id") == F.col("key"))
    with pytest.raises(ColumnError, match="2 columns are called 'y'"):
        framed(twice, "id")
