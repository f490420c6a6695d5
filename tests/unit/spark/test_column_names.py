"""Which column a user's name stands for, and what is said of one that cannot become a tensor."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.mllib.linalg import VectorUDT as OldVectorUDT
from pyspark.sql import types as T

from sparktorch.data.columns import Columns, InputOptions, TensorSpec
from sparktorch.errors import ColumnError
from sparktorch.ml.fit.first_row_trial import first_inputs
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import plan_inputs
from sparktorch.spark.frame.prepare import Frame
from sparktorch.spark.frame.refusals import no_tensor

_INNER = T.StructType().add("b", T.StringType()).add("c.d", T.StructType().add("Deep", T.FloatType()))
SCHEMA = (
    T.StructType()
    .add("id", T.LongType())
    .add("Features", VectorUDT())
    .add("a.b", T.IntegerType())
    .add("a", _INNER)
    .add("tick`s", T.IntegerType())
    .add("rows", T.ArrayType(T.StructType().add("x", T.DoubleType())))
    .add("grid", T.ArrayType(T.ArrayType(T.StructType().add("x", T.DoubleType()))))
    .add("twice", T.IntegerType())
    .add("twice", T.IntegerType())
    .add("case", T.IntegerType())
    .add("CASE", T.StringType())
)


def names(case_sensitive: bool = False) -> ColumnNames:
    return ColumnNames(SCHEMA, lambda: case_sensitive)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("id", "bigint"),
        ("ID", "bigint"),
        ("a.b", "int"),  # a column of that very name goes before a path
        ("A.B", "int"),
        ("`a`.b", "string"),
        ("a.`c.d`.deep", "float"),
        ("tick`s", "int"),
        ("`tick``s`", "int"),
        ("rows.x", "array<double>"),
    ],
)
def test_a_name_is_a_columns_own_or_else_a_path_into_structs(name: str, kind: str) -> None:
    assert names().type_of(name).simpleString() == kind


@pytest.mark.parametrize(
    ("name", "case_sensitive", "says"),
    [
        ("features", True, ["no column 'features'", "did you mean 'Features'"]),
        ("a.e", False, ["no column 'a.e': 'a' has no field 'e'", "valid names: b, c.d"]),
        ("grid.x", False, ["'grid' has no field 'x'", "its type is array<array<struct<x:double>>>"]),
        ("a.", False, ["no column 'a.'"]),
        ("twice", False, ["2 columns are called 'twice'", "left.join(right, 'id')", "toDF"]),
        ("case", False, ["'case' or 'CASE', which differ in case alone", "spark.sql.caseSensitive=true"]),
    ],
)
def test_a_name_of_no_column_or_of_several_is_refused(name: str, case_sensitive: bool, says: list[str]) -> None:
    with pytest.raises(ColumnError) as caught:
        names(case_sensitive).type_of(name)
    assert caught.value.where["column"] == name
    for text in says:
        assert text in str(caught.value)


def test_case_tells_columns_apart_where_spark_says_so() -> None:
    assert names(case_sensitive=True).type_of("CASE").simpleString() == "string"
    assert names(case_sensitive=True).called("case") == ["case"]
    assert names().called("cASe") == ["case", "CASE"]


def test_whether_case_counts_is_asked_only_where_it_matters() -> None:
    def asked() -> bool:
        raise AssertionError("asked")

    found = ColumnNames(SCHEMA, asked)
    assert found.type_of("id").simpleString() == "bigint"
    with pytest.raises(ColumnError, match="2 columns"):
        found.type_of("twice")


def test_a_column_named_twice_is_two_inputs_and_two_places_of_a_packed_one() -> None:
    packed, vector = plan_inputs(names(), ["id", "rows.x", "id"], InputOptions(assemble=True))
    assert (packed.sources, packed.places, packed.shape, vector.column) == (("id", "id"), (0, 2), (2,), "rows.x")
    specs = plan_inputs(names(), ["id", "id", "id"], InputOptions())
    sample = pa.record_batch([pa.array([place]) for place in range(3)], [spec.name for spec in specs])
    _, inputs = first_inputs(Frame(None, Columns(inputs=tuple(specs)), sample))  # type: ignore[arg-type]
    assert list(inputs) == ["column 'id'", "input 1, column 'id'", "input 2, column 'id'"]
    assert [tensor.tolist() for tensor in inputs.values()] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize(("value", "what"), [(None, "null"), (math.nan, "NaN or infinite")])
def test_a_first_row_that_cannot_be_trained_on_is_told_as_the_first_row(value: float | None, what: str) -> None:
    columns = Columns(inputs=(TensorSpec(name="x0", column="a", dtype="float32"),))
    frame = Frame(None, columns, pa.record_batch([pa.array([value], pa.float32())], ["x0"]))  # type: ignore[arg-type]
    with pytest.raises(ColumnError, match=f"^the first row holds {what} values in column 'a', and others were not"):
        first_inputs(frame)


def test_a_vector_of_spark_mllib_is_told_from_one_of_spark_ml() -> None:
    assert "MLUtils.convertVectorColumnsToML(df, 'x')" in no_tensor(OldVectorUDT(), "x").hint


@pytest.mark.parametrize("kind", [T.DateType(), T.TimestampType(), T.TimestampNTZType()])
def test_of_dates_and_times_the_estimators_of_tables_are_named(kind: T.DataType) -> None:
    assert "TabularClassifier and TabularRegressor take such columns as they are" in no_tensor(kind, "x").hint
