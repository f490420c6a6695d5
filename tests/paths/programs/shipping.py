"""Code that executors lack: that they lack it, what a user is told who ships none, and how it gets there."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from actions import compare
from kinds import KINDS
from pyspark.sql import DataFrame, SparkSession

from sparktorch import TorchRegressor
from sparktorch.errors import SparkTorchError


def found(spark: SparkSession, module: str) -> set[str]:
    """Returns where tasks find a module, or the error that they get."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            try:
                where = str(importlib.import_module(module).__file__)
            except ImportError as error:
                where = str(error)
            yield pa.RecordBatch.from_pydict({"where": [where]})

    return {row["where"] for row in spark.range(0, 4, 1, 2).mapInArrow(look, "where string").collect()}


def lacks(spark: SparkSession) -> None:
    """Fails if a task can import what has not been shipped."""
    for module in ("sparktorch", "nets", "private"):
        assert found(spark, module) == {f"No module named '{module}'"}


def shipped(spark: SparkSession) -> None:
    """Fails if tasks have the package from anywhere but the zip that was shipped, or the module from elsewhere."""
    (package,), (module,) = found(spark, "sparktorch"), found(spark, "nets")
    assert "sparktorch.zip" in package, package
    assert module != str(Path(__file__).with_name("nets.py")), module


def ship(spark: SparkSession, *files: str) -> None:
    """Ships zips and modules as a user does."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        spark.addArtifacts(*files, pyfile=True)
    else:
        for file in files:
            spark.sparkContext.addPyFile(file)


def told(rows: DataFrame, *texts: str, device: str = "auto") -> None:
    """Fails unless a fit fails and says all of this."""
    said = ""
    try:
        KINDS["floats"].estimator().setDevice(device).fit(rows)
    except SparkTorchError as error:
        said = str(error)
    missing = [text for text in texts if text not in said]
    assert not missing, f"{missing} not in what the fit has said: {said}"


def save_private(rows: Callable[[], DataFrame], path: Path) -> None:
    """Saves a model with its code as an MLflow model, and beside it what it says of the rows."""
    from sparktorch.tracking import save_model

    fitted = TorchRegressor(
        module="private:Private", moduleParams={"width": 6}, labelCol="target", numWorkers=1, epochs=1
    ).fit(rows())
    save_model(fitted, str(path), pytorch=False)
    path.with_suffix(".json").write_text(json.dumps(KINDS["floats"].expected(fitted.module)))


def load_private(rows: Callable[[], DataFrame], path: Path) -> None:
    """Scores with that model where neither the driver nor the executors have its module."""
    from sparktorch.tracking import load_model

    try:
        importlib.import_module("private")
    except ImportError:
        pass
    else:
        raise AssertionError("the driver has the module already")
    expected: dict[str, dict[str, Any]] = json.loads(path.with_suffix(".json").read_text())
    scored = load_model(str(path)).transform(rows())
    compare([row.asDict() for row in scored.collect()], {int(i): scores for i, scores in expected.items()})
