"""Writes an archive of the classes that Spark loads: `python scripts/class_archive.py .venv/spark.jsa`.

A JVM that maps it (`-XX:SharedArchiveFile`) starts Spark in about half the processor time, and does nothing else in
another way; the tests start dozens. It serves JVMs with the class path of this Python's pyspark.
"""

import os
import sys
import tempfile
from pathlib import Path

archive = Path(sys.argv[1]).absolute()
partial = archive.with_suffix(".partial")
os.environ["JAVA_TOOL_OPTIONS"] = f"-XX:ArchiveClassesAtExit={partial} -XX:TieredStopAtLevel=1 -Xlog:disable"
os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}

from pyspark.ml.feature import VectorAssembler  # noqa: E402 - the JVM starts with the environment
from pyspark.sql import SparkSession  # noqa: E402
from pyspark.sql import functions as F  # noqa: E402

with tempfile.TemporaryDirectory() as folder:
    os.environ["SPARK_LOCAL_DIRS"] = folder
    spark = SparkSession.builder.master("local[2]").config("spark.sql.warehouse.dir", f"{folder}/tables").getOrCreate()
    rows = spark.range(100).select("id", (F.col("id") / 3).alias("x"), F.array(F.rand(1)).alias("y")).repartition(2)
    for form in ("json", "parquet"):
        rows.write.format(form).save(f"{folder}/{form}")
        read = spark.read.schema(rows.schema).format(form).load(f"{folder}/{form}")
        read.where("x > 1").groupBy((F.col("id") % 3).alias("k")).agg(F.sum("x")).toPandas()
    rows.write.saveAsTable("rows")
    scored = (
        VectorAssembler(inputCols=["x"], outputCol="v").transform(spark.table("rows")).join(read.select("id"), "id")
    )
    scored.mapInArrow(lambda batches: batches, scored.schema, barrier=True).dropDuplicates(["id"]).collect()
    stream = spark.readStream.schema(rows.schema).parquet(f"{folder}/parquet").writeStream.format("parquet")
    stream.option("checkpointLocation", f"{folder}/c").trigger(availableNow=True).start(
        f"{folder}/s"
    ).awaitTermination()
    jvm = spark.sparkContext._gateway.proc
    spark.stop()
    jvm.stdin.close()
    jvm.wait()  # The JVM writes the archive when it ends.
partial.rename(archive)
