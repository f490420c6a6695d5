"""Walks cells of the table on one master, in a session with no settings; writes what came of each as a JSON line."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import shipping
from actions import ACTIONS, Way
from kinds import KINDS
from pyspark.sql import DataFrame, SparkSession
from sources import Rows

from sparktorch import TorchClassificationModel, TorchRegressionModel


class Walk:
    """A session, the models of all kinds, and the results so far."""

    def __init__(self, spark: SparkSession, shared: Path, results: Path) -> None:
        """Takes the session, the folder of the models, and the file of the results."""
        self._spark, self._models, self._results = spark, shared, results
        self._rows = {name: Rows(spark, name, kind, Path("rows").absolute()) for name, kind in KINDS.items()}
        self._kept: dict[str, Any] = {}

    def rows(self, source: str, kind: str, *, stream: bool = False) -> DataFrame:
        """Returns the rows of a kind from a source."""
        return self._rows[kind].frame(source, stream=stream)

    def cell(self, source: str, kind: str, action: str) -> None:
        """Walks one cell."""
        rows = self.rows(source, kind, stream=action == "stream")
        folder = Path("out", source, kind, action).absolute()
        try:
            ACTIONS[action](Way(KINDS[kind], self._model(kind), rows, folder))
        finally:
            self._spark.catalog.clearCache()  # else Spark reads the same file from it in the cells to come

    def _model(self, kind: str) -> Any:
        """Returns the model that `local` has fitted on Parquet files, fitted there, loaded elsewhere."""
        if kind not in self._kept:
            path = self._models / kind
            if path.exists():
                reader = TorchClassificationModel if KINDS[kind].classes else TorchRegressionModel
                self._kept[kind] = reader.load(str(path))
            else:
                self._kept[kind] = KINDS[kind].estimator().fit(self.rows("parquet", kind))
                self._kept[kind].save(str(path))
        return self._kept[kind]

    def note(self, name: str, function: Any, *arguments: Any) -> None:
        """Calls a function, and writes down whether it raised."""
        started, error = time.perf_counter(), None
        try:
            function(*arguments)
        except Exception:
            error = traceback.format_exc()
        line = {"name": name, "error": error, "seconds": round(time.perf_counter() - started, 2)}
        with self._results.open("a") as file:
            file.write(json.dumps(line) + "\n")


def session(master: str) -> SparkSession:
    """Starts a session as a user does."""
    builder = SparkSession.builder
    if master.startswith("connect:"):
        return builder.remote(master.removeprefix("connect:")).getOrCreate()
    return (builder.master(master) if master else builder).getOrCreate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--master", help="as for Spark, or connect:local[n]; none under spark-submit")
    parser.add_argument("--shared", type=Path, help="folder of the models that `local` has fitted")
    parser.add_argument("--results", type=Path, help="file to write to")
    parser.add_argument("--package", help="zip of the package, where executors lack it")
    parser.add_argument("--module", help="the user's module file, where executors lack it")
    parser.add_argument("cells", nargs="*")
    given = parser.parse_intermixed_args()
    spark = session(given.master)
    walk = Walk(spark, given.shared, given.results)
    floats, private = partial(walk.rows, "parquet", "floats"), given.shared / "private"
    if given.package:
        walk.note("lacks", shipping.lacks, spark)
        walk.note("told of the package", shipping.told, floats(), "No module named 'sparktorch'", "--py-files")
        shipping.ship(spark, given.package)
        walk.note("told of the module", shipping.told, floats(), "nets", "--py-files")
        walk.note("private", shipping.load_private, floats, private)
        shipping.ship(spark, given.module)
    if given.master.startswith("local-cluster"):
        no_gpu = "the executors have no GPU"
        walk.note("told of GPUs", partial(shipping.told, device="cuda"), floats(), no_gpu)
    elif not given.master:
        walk.note("shipped", shipping.shipped, spark)
    for cell in given.cells:
        walk.note(cell, walk.cell, *cell.split("-"))
    if given.master.startswith("local["):
        walk.note("private", shipping.save_private, floats, private)
    spark.stop()


if __name__ == "__main__":
    main()
