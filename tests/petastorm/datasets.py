"""Writes data sets with the real package. Run as a module, it writes the one under `tests/data`."""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

from petastorm import codecs
from petastorm.etl.dataset_metadata import materialize_dataset
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from tests.support.petastorm import FIELDS, ROWS, STORED, Kind, row

__all__ = ["SCHEMA", "write"]


def _codec(field: Kind) -> Any:
    name, _, arguments = field.codec.partition("(")
    if name.endswith("Type"):
        return codecs.ScalarCodec(eval(f"T.{name}({arguments.rstrip(')')})", {"T": T}))
    return eval(f"codecs.{name}({arguments.rstrip(')')})", {"codecs": codecs}) if name else None


SCHEMA = Unischema(
    "Everything",
    [UnischemaField(field.name, field.dtype, field.shape, _codec(field), field.nullable) for field in FIELDS],
)


def write(spark: SparkSession, folder: Path) -> None:
    """Writes all rows into a folder, partitioned by two fields."""
    url = folder.as_uri()
    with warnings.catch_warnings():  # of what pyarrow is about to take away
        warnings.simplefilter("ignore")
        with materialize_dataset(spark, url, SCHEMA, row_group_size_mb=1):
            rows = [dict_to_spark_row(SCHEMA, row(number)) for number in range(ROWS)]
            frame = spark.createDataFrame(rows, SCHEMA.as_spark_schema()).coalesce(1)
            frame.write.partitionBy("part", "year").parquet(url)


if __name__ == "__main__":
    logging.disable()
    shutil.rmtree(STORED, ignore_errors=True)
    session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    write(session, STORED)
    session.stop()
    for extra in (*STORED.rglob("*.crc"), STORED / "_SUCCESS"):
        extra.unlink()
