"""Reads Petastorm data sets as DataFrames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, get_args

import fsspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from sparktorch.adapters.petastorm.decoder import ARROW_TYPES, Decoder, Layout, schema_in
from sparktorch.adapters.petastorm.unischema import UnischemaField
from sparktorch.base.config import one_of
from sparktorch.base.imports import pillow
from sparktorch.errors import DatasetError
from sparktorch.spark.column_names import quoted
from sparktorch.spark.session import is_connect

__all__ = ["read_petastorm"]


def read_petastorm(
    spark: SparkSession,
    path: str,
    *,
    columns: Sequence[str] | None = None,
    where: Column | str | None = None,
    layout: Layout = "nested",
    undecoded: Sequence[str] = (),
) -> DataFrame:
    """Reads a data set that Petastorm has written, as a DataFrame of ordinary columns.

    Petastorm is not needed. The executors decode batch by batch; images need Pillow there. The schema is read
    from the pickle in `_common_metadata` without running code from it.

    Args:
        spark: The session, classic or Connect.
        path: The data set's folder, as for `spark.read`. On Connect, a task reads its file `_common_metadata` with
            fsspec, and executors need fsspec's package for the URL scheme.
        columns: Names of the fields to read, `None` for all. Other fields are neither read nor decoded; a `select`
            on the result would not avoid decoding.
        where: Condition on the rows to read, by scalar fields and partition columns. It is applied before decoding.
        layout: How arrays and images become columns. `nested`: arrays, nested once per dimension. `flat`: one array
            of all values in C order; a shape of several dimensions, one of them `None`, adds a column `NAME_shape`
            of `array<int>`. `flat` is faster for images.
        undecoded: Names of fields to keep as binary: `.npy` or `.npz` files, PNG or JPEG images.

    Returns:
        One column per field, in the order of the schema. bool, int8 … int64, float32, float64 and str become
        the corresponding Spark types; uint8, uint16 and uint32 the next wider signed types; uint64 becomes
        bigint, float16 float. Decimals, dates and times stay as stored. Every column is nullable.

    Raises:
        DatasetError: There is no Petastorm data set at `path`, its schema is refused, or a field cannot become a
            column. Errors in rows, such as a corrupt image, fail the query that reads them.
        ConfigError: A name in `columns` or `undecoded`, or the layout, is unknown; or there are images to decode
            but no Pillow.
    """
    one_of("layout", layout, get_args(Layout))
    fields, stored = schema_in(_common_metadata(spark, path))
    for param, names in (("columns", columns or ()), ("undecoded", undecoded)):
        for name in names:
            one_of(param, name, tuple(field.name for field in fields))
    chosen = [field for field in fields if columns is None or field.name in columns]
    decoder = Decoder(
        encoded=tuple(field for field in chosen if field.codec != "plain" and field.name not in undecoded),
        layout=layout,
    )
    decoder.check()
    if any(field.codec == "image" for field in decoder.encoded) and not is_connect(spark):
        pillow()  # It fails here, and not in a task, if driver and executors have the same packages.
    data = _read(spark, path, fields, stored)
    if where is not None:
        data = data.where(where)
    data = data.select(*(_scalar(data, field) for field in chosen))
    return _decoded(data, chosen, decoder) if decoder.encoded else data


def _common_metadata(spark: SparkSession, path: str) -> bytes:
    """Returns the content of `_common_metadata`, which Spark's own sources ignore because of its leading underscore."""
    file = path.rstrip("/") + "/_common_metadata"
    content = _through_executor(spark, file) if is_connect(spark) else _through_hadoop(spark, file)
    if content is None:
        raise DatasetError(
            f"there is no {file}",
            hint="Petastorm's materialize_dataset writes it; a data set without it is read with spark.read.parquet",
        )
    return content


def _through_hadoop(spark: SparkSession, file: str) -> bytes | None:
    """Reads a file through Hadoop, with the session's settings; `None` if it does not exist."""
    session: Any = spark
    path = session._jvm.org.apache.hadoop.fs.Path(file)
    system = path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
    if not system.exists(path):
        return None
    stream = system.open(path)
    try:
        return bytes(stream.readAllBytes())
    finally:
        stream.close()


def _through_executor(spark: SparkSession, file: str) -> bytes | None:
    """Reads a file in a task, with fsspec: a Connect client has no Hadoop and may not reach the file."""
    rows = spark.range(1).coalesce(1).mapInArrow(partial(_fetch, file=file), "content binary").collect()
    return None if rows[0][0] is None else bytes(rows[0][0])


def _fetch(batches: Iterator[pa.RecordBatch], *, file: str) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        try:
            with fsspec.open(file, "rb") as stream:
                content = stream.read()
        except FileNotFoundError:
            content = None
        yield pa.RecordBatch.from_pydict({"content": pa.array([content], pa.binary())})


def _read(spark: SparkSession, path: str, fields: Sequence[UnischemaField], stored: frozenset[str]) -> DataFrame:
    """Reads the Parquet files; partition columns of dtype str are read as strings."""
    data = spark.read.parquet(path)
    # Spark infers the types of partition columns, and reads "007" as a number.
    guessed = {
        field.name
        for field in fields
        if field.dtype == "str" and field.name in data.columns and field.name not in stored
    }
    if all(data.schema[name].dataType == T.StringType() for name in guessed):
        return data
    kinds = [T.StructField(f.name, T.StringType() if f.name in guessed else f.dataType) for f in data.schema.fields]
    return spark.read.schema(T.StructType(kinds)).parquet(path)


def _scalar(data: DataFrame, field: UnischemaField) -> Column:
    column = quoted(field.name)
    if field.codec != "plain" or field.shape or field.dtype not in ARROW_TYPES or field.dtype == "bytes":
        return column  # It has the type that the files have.
    return column.cast(from_arrow_type(ARROW_TYPES[field.dtype])).alias(field.name)


def _decoded(data: DataFrame, fields: Sequence[UnischemaField], decoder: Decoder) -> DataFrame:
    encoded = {field.name for field in decoder.encoded}
    schema = T.StructType()
    for field in fields:
        if field.name not in encoded:
            schema.add(field.name, data.schema[field.name].dataType)
            continue
        for name, kind in decoder.columns(field).items():
            if name != field.name and name in data.columns:
                raise DatasetError(
                    f"the shapes of field {field.name!r} need a column {name!r}, which is there already",
                    hint="leave one out with columns=[...], or use layout='nested'",
                    field=field.name,
                )
            schema.add(name, from_arrow_type(kind))
    return data.mapInArrow(decoder, schema)
