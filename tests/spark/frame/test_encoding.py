"""What the driver sends and looks at: types as they travel, and the first row that shows what there is to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchRegressor
from sparktorch.data.columns import InputOptions
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import plan_inputs
from sparktorch.spark.frame.prepare import Frame, prepare
from tests.spark.columns import Flat


def framed(data: DataFrame, *inputs: str, **options: Any) -> Frame:
    """Returns what is made of the inputs of a DataFrame with a label `y`."""
    return prepare(data, "regression", inputs=inputs, label="y", options=InputOptions(**options))


def shown(found: Frame) -> list[Any]:
    """Returns the values of the first row, as far as they are inputs."""
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
        ("tinyint", {"fill": 300, "dtypes": {"x": "int8"}}, "column 'x', int8"),
        ("int", {"fill": NAN}, "column 'x', int64"),
        ("int", {"fill": 0.5, "assemble": True}, "column 'x', int64"),
        ("array<int>", {"fill": 0.5}, "column 'x', int64"),
        ("float", {"fill": 1e39}, "column 'x', float32"),
        ("int", {"fill": 0.5, "as_they_are": True}, "column 'x', int32"),
        ("boolean", {"fill": 2, "as_they_are": True}, "column 'x', bool"),
        ("binary", {"fill": 256, "layouts": {"x": "image"}, "dtypes": {"x": "uint8"}}, "column 'x', uint8"),
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


def test_a_filling_that_fits_passes(spark: SparkSession) -> None:
    row = spark.range(1).selectExpr("1 as i", "array(1.5f) as x", "true as b", "'a' as s")
    for names, options in [
        (["i"], {"fill": -3.0}),
        (["i"], {"fill": 0.5, "dtypes": {"i": "float32"}}),
        (["x"], {"fill": 0.1}),
        (["b", "s"], {"fill": 1.0, "as_they_are": True}),
        (["s"], {"fill": 0.5, "as_they_are": True}),
    ]:
        specs = plan_inputs(ColumnNames.of(row), names, InputOptions(**options))
        assert [spec.fill for spec in specs] == [options["fill"]] * len(names)


@pytest.mark.parametrize(
    ("value", "sql", "expected"),
    [
        ("named_struct('my-field', 1, 'b', 'x')", "struct<`my-field`:int,b:string>", {"my-field": 1, "b": "x"}),
        ("named_struct('a', cast(1.5 as decimal(9,2)))", "struct<a:double>", {"a": 1.5}),
        ("array(named_struct('a b', 1.5BD))", "array<struct<`a b`:double>>", [{"a b": 1.5}]),
        ("array(1.5BD)", "array<double>", [1.5]),
        ("array('a')", "array<string>", ["a"]),
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


@pytest.mark.parametrize("value", ["named_struct('a', map('a', 1))", "array(named_struct('a', interval '1' day))"])
def test_what_cannot_be_kept_is_refused_however_deep(spark: SparkSession, value: str) -> None:
    data = spark.range(1).select(F.expr(value).alias("x"), F.lit(1.0).alias("y"))
    with pytest.raises(ColumnError, match="cannot become a tensor"):
        plan_inputs(ColumnNames.of(data), ["x"], InputOptions(as_they_are=True))


def test_an_image_without_data_is_a_null(spark: SparkSession) -> None:
    image = "named_struct('origin', '', 'height', 1, 'width', 2, 'nChannels', 1, 'mode', 0, 'data', {})"
    rows = [F.expr(image.format(data)).alias("x") for data in ("cast(null as binary)", "binary('ab')")]
    data = spark.range(1).select(F.explode(F.array(*rows)).alias("x"), F.lit(1.0).alias("y")).coalesce(1)
    assert [row["x0"] is None for row in framed(data, "x", shapes={"x": (1, 1, 2)}).data.collect()] == [True, False]
    found = framed(data, "x", drop=True)
    assert found.columns.inputs[0].shape == (3, 1, 2)


def test_lists_that_nulls_alone_tell_apart_have_keys_of_their_own(spark: SparkSession) -> None:
    rows: list[Any] = [([[1.0], None],), ([None, [1.0]],), ([[1.0], [None]],), ([[1.0], [2.0]],)]
    found = framed(rows_of(spark, "x array<array<float>>", *rows), "x", fill=0.0)
    assert len({row["k"] for row in found.data.collect()}) == 4


def described(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Makes two tensors of a struct, in another order in training than in scoring."""
    structs = columns["x"]
    number = torch.tensor(structs.field("my-field").to_pylist(), dtype=torch.float32)[:, None]
    found = {"number": number, "length": torch.tensor([[len(text or "")] for text in structs.field("b").to_pylist()])}
    return found if epoch is None else dict(reversed(found.items()))


def test_columns_are_found_by_path_in_any_case_and_with_dots_in_their_names(spark: SparkSession) -> None:
    who = "named_struct('x', float(id), 'y', id * 2f, 'w', 1, 'V', id = 3) as Who"
    data = spark.range(12).selectExpr("id", who, "float(id) as `a.b`", "id * 2f as y")
    params: dict[str, Any] = {"module": Flat, "moduleParams": {"width": 2}, "batchSize": 4, "progress": False}
    nested = TorchRegressor(
        inputCols=["who.x", "A.B"],
        labelCol="Who.y",
        weightCol="who.w",
        validationIndicatorCol="who.v",
        idCol="ID",
        **params,
    ).fit(data)
    flat = data.selectExpr("float(id) x", "float(id) b", "y", "1 as w", "id = 3 as v", "id")
    plain = TorchRegressor(
        inputCols=["x", "b"], labelCol="y", weightCol="w", validationIndicatorCol="v", idCol="id", **params
    ).fit(flat)
    assert [spec.column for spec in nested.trained.inputs] == ["who.x", "A.B"]
    assert nested.transform(data).select("prediction").collect() == plain.transform(flat).select("prediction").collect()
    twice = data.join(data.withColumnRenamed("id", "key"), F.col("id") == F.col("key"))
    with pytest.raises(ColumnError, match="2 columns are called 'y'"):
        framed(twice, "id")


def test_a_fit_takes_structs_with_large_strings_and_tensors_by_name(spark: SparkSession) -> None:
    data = spark.range(24).selectExpr(
        "named_struct('my-field', cast(id as double), 'b', repeat('a', cast(id % 5 as int))) as x", "1f as y"
    )
    setting = "spark.sql.execution.arrow.useLargeVarTypes"
    before = spark.conf.get(setting)
    try:
        spark.conf.set(setting, "true")
        model = TorchRegressor(
            module=Flat,
            moduleParams={"width": 2, "expects": ["float32 2", "int64 2"]},
            featuresCol="x",
            labelCol="y",
            batchSize=8,
            preprocess=described,
            progress=False,
        ).fit(data)
    finally:
        spark.conf.set(setting, before)
    assert model.trained.returned == ("number", "length")
    assert len(model.transform(data).collect()) == 24
