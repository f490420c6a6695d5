"""Petastorm's side of `benchmarks.ingest`, run by the Python of its own environment.

`petastorm_loader.py SOURCE PARQUET FOLDER` takes a turn for every line on its standard input: its converter
materialises the rows in FOLDER, and reads them all into tensors, once by the loader that it makes of itself,
`DataLoader`, and once by `BatchedDataLoader`. Each turn prints the seconds of all three as a line of JSON. SOURCE is
`parquet`, or `cached` if Spark is to hold the rows in memory before the first turn.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from petastorm.pytorch import BatchedDataLoader, DataLoader
from petastorm.spark import SparkDatasetConverter, make_spark_converter
from pyspark.sql import SparkSession

BATCH = 10_000


def main() -> None:
    """Takes turns until the input ends."""
    source, parquet, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.mkdir()
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "4g")
        .config("spark.local.dir", str(folder / "spark"))
        .config(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, (folder / "cache").as_uri())
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    data = spark.read.parquet(parquet)
    if source == "cached":
        data.cache().count()
    for _ in sys.stdin:
        started = time.perf_counter()
        converter = make_spark_converter(data, dtype=None)
        materialised = time.perf_counter()
        took = {
            "materialise": materialised - started,
            "load": load(converter, DataLoader),
            "load_batched": load(converter, BatchedDataLoader),
        }
        converter.delete()
        print(json.dumps(took), flush=True)
    spark.stop()


def load(converter: SparkDatasetConverter, kind: type[DataLoader | BatchedDataLoader]) -> float:
    """Reads all rows; returns the seconds."""
    started, rows = time.perf_counter(), 0
    with converter.make_torch_dataloader(
        batch_size=BATCH, num_epochs=1, workers_count=2, data_loader_fn=kind
    ) as loader:
        for batch in loader:
            rows += len(batch["features"])
    assert rows == len(converter), (rows, len(converter))
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
