"""Names of columns are compared as Spark compares them, whatever case they are written in."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import types as T

from sparktorch import TabularClassifier, TabularRegressor
from sparktorch.errors import ColumnError
from sparktorch.ml.fit.values import Values
from sparktorch.spark.column_names import ColumnNames
from sparktorch.tasks.tables.kinds import kinds_of_columns

SCHEMA = (
    T.StructType()
    .add("label", T.IntegerType())
    .add("size", T.DoubleType())
    .add("Kind", T.StringType())
    .add("part", T.StructType().add("cost", T.DoubleType()))
)


def by_kind(estimator: Any, *, case_sensitive: bool = False) -> Any:
    return kinds_of_columns(Values(estimator), ColumnNames(SCHEMA, lambda: case_sensitive))


@pytest.mark.parametrize("named", [{"inputCols": ["size", "label"]}, {"numericCols": ["LABEL"]}])
@pytest.mark.parametrize("label", ["label", "Label", "`label`"])
@pytest.mark.parametrize("kind", [TabularClassifier, TabularRegressor])
def test_a_label_among_the_inputs_is_refused_in_whatever_case_it_is_named(kind: Any, named: Any, label: str) -> None:
    with pytest.raises(ColumnError, match=f"the label '{label}' is among the input columns"):
        by_kind(kind(labelCol=label, **named))


def test_a_field_that_is_the_label_is_refused_among_the_inputs() -> None:
    with pytest.raises(ColumnError, match=r"the label 'part\.Cost' is among the input columns"):
        by_kind(TabularRegressor(labelCol="part.Cost", inputCols=["size", "Part.cost"]))


def test_a_column_that_is_named_in_another_case_is_one_input() -> None:
    inputs = ["SIZE", "kind"]
    assert by_kind(TabularClassifier(inputCols=inputs, categoricalCols=["Kind"])) == (["Kind"], {}, ["SIZE"])
    some = TabularClassifier(inputCols=[*inputs, "size"], categoricalCols=["KIND"], numericCols=["Size"])
    assert by_kind(some) == (["KIND"], {}, ["Size"])


def test_columns_that_differ_in_case_are_two_where_case_matters() -> None:
    schema = T.StructType().add("label", T.IntegerType()).add("Label", T.DoubleType())
    names = ColumnNames(schema, lambda: True)
    estimator = TabularClassifier(labelCol="label", inputCols=["Label"])
    assert kinds_of_columns(Values(estimator), names) == ([], {}, ["Label"])
    assert names.repeated(["label", "Label"]) is None
    assert names.repeated(["label", "Label", "`label`"]) == "`label`"
