"""Data sets of Petastorm as DataFrames: the values as they were written, pruned before they are decoded, and a fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from sparktorch import read_petastorm
from sparktorch.adapters.petastorm.dataframes import _decoded, _through_executor, _through_hadoop
from sparktorch.adapters.petastorm.decoder import Decoder
from sparktorch.adapters.petastorm.unischema import UnischemaField
from sparktorch.errors import ConfigError, DatasetError
from tests.support.petastorm import FIELDS, ROWS, STORED, row

PATH = str(STORED)


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "copy"))


def test_all_rows_are_read_as_they_were_written(spark: SparkSession) -> None:
    frame = read_petastorm(spark, PATH)
    assert frame.columns == [field.name for field in FIELDS]
    types = dict(frame.dtypes)
    assert types["u8"] == "smallint"
    assert types["narrow"] == "bigint"  # stored as int; the schema says int64
    assert (types["part"], types["year"], types["price"], types["day"]) == ("string", "bigint", "decimal(10,2)", "date")
    assert types["volume"] == "array<array<array<smallint>>>"
    found = frame.orderBy("id").collect()
    assert len(found) == ROWS
    for number, values in enumerate(found):
        wanted = row(number)
        for field in FIELDS:
            value, want = values[field.name], wanted[field.name]
            if field.name == "photo" and want is not None:
                assert np.array(value).shape == want.shape
            else:
                assert value == (want.tolist() if isinstance(want, (np.ndarray, np.generic)) else want), field.name


def test_what_is_not_asked_for_is_neither_read_nor_decoded(spark: SparkSession, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    for file in folder.rglob("*.parquet"):
        table = pq.read_table(file, partitioning=None)
        index = table.schema.get_field_index("matrix")
        pq.write_table(table.set_column(index, "matrix", pa.array([b"broken"] * len(table))), file)
    assert read_petastorm(spark, str(folder), columns=["id", "tokens"]).count() == ROWS
    assert read_petastorm(spark, str(folder), where="id < 0").count() == 0
    with pytest.raises(PythonException, match=r"field 'matrix': float32 of shape \(2, 3\) has a row that cannot be"):
        read_petastorm(spark, str(folder), columns=["matrix"]).collect()
    scalars = read_petastorm(spark, str(folder), columns=["id", "u8"])
    plan = scalars._sc._jvm.PythonSQLUtils.explainString(scalars._jdf.queryExecution(), "simple")
    assert "MapInArrow" not in plan


def test_folders_names_stay_what_the_schema_says_they_are(spark: SparkSession, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "part=b").rename(folder / "part=008")
    found = read_petastorm(spark, str(folder), columns=["part"]).distinct().collect()
    assert {values["part"] for values in found} == {"007", "008"}  # Spark alone would say 7 and 8


def test_a_task_reads_the_schema_where_the_driver_cannot(spark: SparkSession) -> None:
    file = f"{PATH}/_common_metadata"
    assert _through_executor(spark, file) == _through_hadoop(spark, file) == Path(file).read_bytes()
    assert _through_executor(spark, f"{PATH}/nothing") is _through_hadoop(spark, f"{PATH}/nothing") is None


def test_it_is_refused_on_the_driver(spark: SparkSession) -> None:
    with pytest.raises(DatasetError, match="there is no /nowhere/_common_metadata"):
        read_petastorm(spark, "/nowhere")
    with pytest.raises(ConfigError, match=r"columns 'photos' is unknown.*\n.*did you mean 'photo'"):
        read_petastorm(spark, PATH, columns=["photos"])


def test_a_column_of_shapes_whose_name_is_taken_is_refused(spark: SparkSession) -> None:
    image = UnischemaField(name="image", dtype="uint8", shape=(None, 3), codec="ndarray")
    frame = spark.sql("select binary('') image, 1 image_shape")
    with pytest.raises(DatasetError, match="the shapes of field 'image' need a column 'image_shape', which is there"):
        _decoded(frame, [image], Decoder(encoded=(image,), layout="flat"))
    assert _decoded(frame, [image], Decoder(encoded=(image,))).columns == ["image"]
