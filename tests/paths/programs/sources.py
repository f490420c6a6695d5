"""Where rows come from: files and tables that Spark has written, what a query makes of them, and the driver's own."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from kinds import Kind
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

_FORMATS = ("parquet", "orc", "json", "csv")


class Rows:
    """The rows of one kind, in whatever way they are asked for; what is written is written once."""

    def __init__(self, spark: SparkSession, name: str, kind: Kind, folder: Path) -> None:
        """Writes nothing yet."""
        self._spark, self._name, self._kind, self._folder = spark, name, kind, folder

    def frame(self, source: str, *, stream: bool) -> DataFrame:
        """Returns the rows of a source, as a stream if asked to."""
        if source == "rows":
            return self._rows
        if source in _FORMATS:
            return self._read(source, source, stream)
        if source in ("partitioned", "stream"):
            return self._read("parquet", source, stream or source == "stream")
        if source == "view":  # of a table
            reader = self._spark.readStream if stream else self._spark.read
            reader.table(self._table).createOrReplaceTempView(f"view_{self._name}")
            return self._spark.sql(f"select * from view_{self._name}")
        data = self._read("parquet", "parquet", stream)
        if source == "join":  # of a union
            every = data.where("id % 3 = 0").unionByName(self._read("orc", "orc", stream).where("id % 3 <> 0"))
            labels = self._read("orc", "orc", stream=False).select("id", "bucket", "target")
            return every.drop("bucket", "target").join(labels, "id")
        if source == "window":
            return data.withColumn("place", F.row_number().over(Window.partitionBy("bucket").orderBy("id")))
        assert source == "cached"
        return data.cache()

    @cached_property
    def _rows(self) -> DataFrame:
        return self._spark.createDataFrame(self._kind.rows(), self._kind.schema)

    @cached_property
    def _table(self) -> str:
        self._rows.repartition(2).write.saveAsTable(f"table_{self._name}")
        return f"table_{self._name}"

    def _read(self, form: str, name: str, stream: bool) -> DataFrame:
        path = self._folder / self._name / name
        if not path.exists():
            writer = self._rows.repartition(2).write
            (writer.partitionBy("bucket") if name == "partitioned" else writer).format(form).save(str(path))
        reader = self._spark.readStream if stream else self._spark.read
        return reader.schema(self._kind.schema).format(form).load(str(path))
