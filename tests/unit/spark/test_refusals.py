"""Columns that cannot become tensors are refused with what to do about them."""

from __future__ import annotations

from pyspark.mllib.linalg import VectorUDT

from sparktorch.spark.frame.refusals import no_tensor


def test_a_vector_of_spark_mllib_is_told_from_one_of_spark_ml() -> None:
    assert "MLUtils.convertVectorColumnsToML(df, 'x')" in no_tensor(VectorUDT(), "x").hint
