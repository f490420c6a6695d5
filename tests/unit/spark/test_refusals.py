"""Columns that cannot become tensors are refused with what to do about them."""

from __future__ import annotations

import pytest
from pyspark.mllib.linalg import VectorUDT
from pyspark.sql import types as T

from sparktorch.spark.frame.refusals import no_tensor


def test_a_vector_of_spark_mllib_is_told_from_one_of_spark_ml() -> None:
    assert "MLUtils.convertVectorColumnsToML(df, 'x')" in no_tensor(VectorUDT(), "x").hint


@pytest.mark.parametrize("kind", [T.DateType(), T.TimestampType(), T.TimestampNTZType()])
def test_of_dates_and_times_the_estimators_of_tables_are_named(kind: T.DataType) -> None:
    assert "TabularClassifier and TabularRegressor take such columns as they are" in no_tensor(kind, "x").hint
