"""A session of its own with what the real package writes into it: data sets, and the cache of its converter."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.petastorm.datasets import write
from tests.spark.conftest import frame, spark, table

__all__ = ["frame", "spark", "table", "written"]


@pytest.fixture(scope="package")
def written(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All rows of `tests.support.petastorm`, in a data set that has just been written."""
    folder = tmp_path_factory.mktemp("petastorm") / "everything"
    write(spark, folder)
    return folder
