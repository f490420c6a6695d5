"""Windows of series cut in the ranks, beside windows that Spark writes out as arrays: memory and time of a fit.

100 series of 5,000 hours in Parquet, a context of 168 rows and a horizon of 24, so 480,900 windows; the linear network
of `Forecaster`, batches of 1,024 windows, 2 epochs, two ranks, CPU. Both sides train the same module on the same
windows with the same training step: `Forecaster` on rows, and `TorchEstimator` on the arrays that `collect_list` over a
window of Spark's makes of the same rows. A fit's seconds are those from the DataFrame to the model. "Held" are the rows
that ranks keep, without the 8 bytes by which either side knows where a sample is; "peak" is the most memory of a rank's
process, torch and all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from benchmarks.common import Goal, arguments, interleave, machine, report, seconds, session, workspace
from sparktorch import Forecaster, TorchEstimator
from sparktorch.tasks.series.loss import SeriesStep
from sparktorch.tasks.series.network import SeriesModule

CONTEXT, HORIZON = 168, 24
SIDES = CUT, WRITTEN = "cut in ranks", "written as arrays"
OF_BOTH: dict[str, Any] = {"batchSize": 1024, "epochs": 2, "numWorkers": 2, "device": "cpu", "progress": False}
GOALS = {
    "bytes held, written as arrays / cut": Goal(5, at_least=True),
    "peak, written as arrays / cut": Goal(1, at_least=True),
    "seconds, cut / written as arrays": Goal(1),
}


def write_rows(path: Path, series: int, rows: int) -> None:
    """Writes series of a daily season and noise, one file a series."""
    draw = np.random.default_rng(0)
    hours = np.arange(rows)
    path.mkdir()
    for number in range(series):
        load = np.sin(hours * 2 * np.pi / 24) + draw.normal(size=rows) * 0.3 + number
        table = pa.table({"meter": np.full(rows, number), "hour": hours, "load": load})
        pq.write_table(table, path / f"{number}.parquet")


def windows(rows: DataFrame) -> DataFrame:
    """Returns a row for each window, with its context and its horizon as arrays."""
    ordered = Window.partitionBy("meter").orderBy("hour")
    load = F.col("load").cast("float")
    past = F.collect_list(load).over(ordered.rowsBetween(-CONTEXT + 1, 0))
    label = F.collect_list(load).over(ordered.rowsBetween(1, HORIZON))
    arrays = rows.select(past.alias("past"), label.alias("label"))
    return arrays.where((F.size("past") == CONTEXT) & (F.size("label") == HORIZON))


class Sides:
    """The sides of the comparison; each returns its seconds, and notes what its ranks held."""

    def __init__(self, rows: DataFrame) -> None:
        self.noted: dict[str, list[float]] = {
            f"{what}, {side}": [] for what in ("MB held", "peak MB") for side in SIDES
        }
        self._rows = rows
        self.counts: set[int] = set()

    def cut(self) -> float:
        """Lets ranks get rows, and cut windows."""
        names = {"groupCol": "meter", "orderCol": "hour", "labelCol": "load"}
        forecaster = Forecaster(**names, **OF_BOTH, context=CONTEXT, horizon=HORIZON, moduleParams={"hidden": []})
        return self._fit(CUT, forecaster, self._rows)

    def written(self) -> float:
        """Lets ranks get windows."""
        network = {"module": "sparktorch.tasks.series.network:SeriesNetwork", "params": {"hidden": []}}
        estimator = TorchEstimator(
            module=SeriesModule,
            moduleParams={**network, "context": CONTEXT, "horizon": HORIZON},
            trainingStep=SeriesStep("L1Loss"),
            inputCols=["past"],
            inputShapes={"past": [CONTEXT, 1]},
            **OF_BOTH,
        )
        return self._fit(WRITTEN, estimator, windows(self._rows))

    def _fit(self, side: str, estimator: Any, rows: DataFrame) -> float:
        summaries: list[Any] = []
        wall = seconds(lambda: summaries.append(estimator.fit(rows).summary))
        ranks = summaries[0].ranks
        self.counts.add(summaries[0].stepsPerEpoch)
        self.noted[f"MB held, {side}"].append(sum(rank["bytes"] for rank in ranks) / 1e6)
        self.noted[f"peak MB, {side}"].append(max(rank["peak_memory"] for rank in ranks) / 1e6)
        return wall


def measured(spark: SparkSession, path: Path, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Returns all samples, and the number of steps of an epoch, which is the same on both sides."""
    sides = Sides(spark.read.parquet(str(path)))
    turns = {CUT: sides.cut, WRITTEN: sides.written}
    for turn in turns.values():  # The first turns warm up.
        turn()
    for values in sides.noted.values():
        values.clear()
    samples = interleave(turns, rounds)
    (steps,) = sides.counts
    return {f"seconds, {side}": values for side, values in samples.items()} | sides.noted, steps


def main() -> None:
    """Measures both sides."""
    asked = arguments(__doc__ or "")
    series, rows, rounds = (10, 1000, 2) if asked.quick else (100, 5000, 5)
    with workspace() as work, session(work, spark__sql__shuffle__partitions="2") as spark:
        write_rows(work / "rows", series, rows)
        samples, steps = measured(spark, work / "rows", rounds)
    median = {name: float(np.median(values)) for name, values in samples.items()}
    report(
        "windows",
        samples=samples,
        ratios={
            "bytes held, written as arrays / cut": median[f"MB held, {WRITTEN}"] / median[f"MB held, {CUT}"],
            "peak, written as arrays / cut": median[f"peak MB, {WRITTEN}"] / median[f"peak MB, {CUT}"],
            "seconds, cut / written as arrays": median[f"seconds, {CUT}"] / median[f"seconds, {WRITTEN}"],
        },
        goals={} if asked.quick else GOALS,
        facts=machine("torch", "pyspark") | {"series": series, "rows": rows, "steps of an epoch": steps},
        path=asked.json,
    )


if __name__ == "__main__":
    main()
