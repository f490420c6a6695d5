"""Searches over Params: rows read once for many fits, beside a job for each fit and a process for each trial.

100,000 rows of 100 float32 in Parquet, MLP 100-256-1, AdamW, 3 epochs, batches of 1,024 rows, two ranks or as many
processes, CPU. Cross-validation: 3 folds of 4 learning rates, RMSE, by Spark's CrossValidator, with our `fitMultiple`
and with Spark's own, and by TorchCrossValidator, which reads the rows once in all; also with two fits of one rank at a
time, each on all rows. Trials: 16 learning rates, with the loss of a tenth of the rows, by TorchTuner in two groups of
one rank, with 3 epochs a trial, and with 9, pruned and not, by 16 warm fits on two ranks one after another, and by two
processes at a time of which each reads the Parquet files, trains one trial and ends.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pyarrow.parquet as pq
import torch
from optuna.distributions import FloatDistribution
from pyspark.ml import Estimator
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks import by_hand
from benchmarks.common import Goal, arguments, interleave, machine, report, run_process, seconds, session, workspace
from benchmarks.fit_wall import BATCH, EPOCHS, FILES, RANKS, estimator, write_rows
from sparktorch import TorchCrossValidator, TorchRegressor, TorchTuner

RATES = [3e-4, 1e-3, 3e-3, 1e-2]
TRIALS = 16
FOLDS = 3
PRUNED_EPOCHS = 9
GOALS = {
    "CrossValidator, ours / Spark's fitMultiple": Goal(0.45),
    "TorchCrossValidator / Spark's fitMultiple": Goal(0.45),
    "TorchCrossValidator, two fits at a time / Spark's fitMultiple": Goal(0.45),
    "rows read, TorchCrossValidator / rows": Goal(1.0),
    "TorchTuner, 16 trials / 16 warm fits": Goal(0.35),
    "TorchTuner with pruning / without": Goal(0.6),
    "epochs with pruning / without": Goal(0.5),
    "second fit on prepared rows - its loop, s": Goal(0.25),
}


class ByJob(TorchRegressor):
    """The estimator with Spark's own `fitMultiple`: a fit for each param map."""

    fitMultiple = Estimator.fitMultiple  # noqa: N815 - Spark's name


class Sides:
    """The sides of the comparison; each returns its seconds."""

    def __init__(self, data: DataFrame, path: Path) -> None:
        self.noted: dict[str, list[float]] = {}
        self._data, self._path = data, path
        self._rows = data.count()

    def cross_validation(
        self, tool: type[CrossValidator], kind: type[TorchRegressor], *, workers: int = RANKS, parallelism: int = 1
    ) -> float:
        """Runs a whole search by cross-validation."""
        usual = estimator(batch=BATCH, epochs=EPOCHS).setParams(numWorkers=workers)
        regressor = kind(
            **{param.name: value for param, value in usual.extractParamMap().items() if usual.isSet(param)}
        )
        search = tool(
            estimator=regressor,
            estimatorParamMaps=[{regressor.learningRate: rate} for rate in RATES],
            evaluator=RegressionEvaluator(),
            numFolds=FOLDS,
            parallelism=parallelism,
            seed=1,
        )
        return seconds(lambda: search.fit(self._data.drop("held_out")))

    def tuner(self, *, epochs: int = EPOCHS, pruner: str | None = None) -> float:
        """Runs a search of 16 trials."""
        models: list[Any] = []
        search = TorchTuner(
            estimator=self._validated(epochs=epochs),
            space={"learningRate": FloatDistribution(1e-4, 1e-1, log=True)},
            trials=TRIALS,
            workersPerTrial=1,
            sampler=optuna.samplers.RandomSampler(seed=3),
            pruner=pruner,
        )
        wall = seconds(lambda: models.append(search.fit(self._data)))
        self._note("epochs", float(models[0].trials["epochs"].sum()))
        return wall

    def pruned(self) -> float:
        """Runs the search with more epochs, of which ASHA spares most."""
        wall = self.tuner(epochs=PRUNED_EPOCHS, pruner="asha")
        self._note("epochs, pruned", self.noted["epochs"].pop() / (TRIALS * PRUNED_EPOCHS))
        return wall

    def fits(self) -> float:
        """Runs as many fits, one after another."""
        estimator = self._validated(epochs=EPOCHS)
        rates = [{estimator.learningRate: float(rate)} for rate in np.geomspace(1e-4, 1e-1, TRIALS)]
        return seconds(lambda: [estimator.fit(self._data, rate) for rate in rates])

    def processes(self) -> float:
        """Runs as many processes, two at a time, each of which reads the rows."""
        call = "from benchmarks.search import trial; trial({!r}, {!r})"

        def run(rate: float) -> None:
            run_process([sys.executable, "-c", call.format(str(self._path), float(rate))])

        with ThreadPoolExecutor(RANKS) as pool:
            return seconds(lambda: list(pool.map(run, np.geomspace(1e-4, 1e-1, TRIALS))))

    def prepared(self) -> float:
        """Times the second fit on rows that ranks hold."""
        estimator = self._validated(epochs=EPOCHS)
        with estimator.prepare(self._data) as rows:
            estimator.fit(rows)
            models: list[Any] = []
            wall = seconds(lambda: models.append(estimator.fit(rows)))
        self._note("second fit on prepared rows - its loop, s", wall - models[0].summary.seconds["rank0.train"])
        return wall

    def read(self) -> None:
        """Counts the rows that TorchCrossValidator reads."""
        seen = self._data.sparkSession.sparkContext.accumulator(0)

        def count(batches: Any) -> Any:
            for batch in batches:
                seen.add(batch.num_rows)
                yield batch

        data, self._data = self._data, self._data.mapInArrow(count, self._data.schema)
        self.cross_validation(TorchCrossValidator, TorchRegressor)
        self._data = data
        self._note("rows read, TorchCrossValidator / rows", seen.value / self._rows)

    def _validated(self, *, epochs: int) -> TorchRegressor:
        return estimator(batch=BATCH, epochs=epochs).setValidationIndicatorCol("held_out")

    def _note(self, name: str, value: float) -> None:
        self.noted.setdefault(name, []).append(value)


def trial(data: str, rate: float) -> None:
    """Trains one trial by hand and prints the loss of the rows held out; called in a process of its own."""
    torch.set_num_threads(1)
    table = pq.read_table(data, use_threads=False).combine_chunks()
    features = torch.from_numpy(table["features"].chunk(0).values.to_numpy().copy()).view(-1, by_hand.WIDTH)
    label = torch.from_numpy(table["label"].chunk(0).to_numpy().copy())
    held = len(label) // 10
    torch.manual_seed(0)
    module = by_hand.MLP()
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, fused=True)
    criterion = torch.nn.MSELoss()
    for _ in range(EPOCHS):
        for index in torch.randperm(len(label) - held).split(BATCH):
            optimizer.zero_grad()
            loss = criterion(module(features[held + index]).squeeze(-1), label[held + index])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            held_loss = criterion(module(features[:held]).squeeze(-1), label[:held])
    print(json.dumps({"loss": float(held_loss)}), flush=True)


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    rows, rounds = (20_000, 2) if options.quick else (100_000, 5)
    with workspace() as work:
        write_rows(work / "data", rows, FILES)
        with session(work, cores=RANKS) as spark:
            data = spark.read.parquet(str(work / "data")).withColumn("held_out", F.xxhash64("label") % 10 == 0)
            sides = Sides(data, work / "data")
            timed: dict[str, Callable[[], float]] = {
                "CrossValidator, Spark's fitMultiple, s": lambda: sides.cross_validation(CrossValidator, ByJob),
                "CrossValidator, our fitMultiple, s": lambda: sides.cross_validation(CrossValidator, TorchRegressor),
                "TorchCrossValidator, s": lambda: sides.cross_validation(TorchCrossValidator, TorchRegressor),
                "TorchCrossValidator, two fits at a time, s": lambda: sides.cross_validation(
                    TorchCrossValidator, TorchRegressor, workers=1, parallelism=RANKS
                ),
                "16 warm fits, s": sides.fits,
                "TorchTuner, 16 trials, s": sides.tuner,
                "TorchTuner, 16 longer trials, s": lambda: sides.tuner(epochs=PRUNED_EPOCHS),
                "TorchTuner, 16 longer trials, pruned, s": sides.pruned,
                "16 processes, two at a time, s": sides.processes,
                "second fit on prepared rows, s": sides.prepared,
            }
            for side in timed.values():
                side()
            sides.noted.clear()
            samples = interleave(timed, rounds)
            sides.read()
    noted = sides.noted
    noted.pop("epochs")
    samples |= noted
    median = {name: statistics.median(values) for name, values in samples.items()}
    by_job, fits = median["CrossValidator, Spark's fitMultiple, s"], median["16 warm fits, s"]
    report(
        "search",
        samples=samples,
        ratios={
            "CrossValidator, ours / Spark's fitMultiple": median["CrossValidator, our fitMultiple, s"] / by_job,
            "TorchCrossValidator / Spark's fitMultiple": median["TorchCrossValidator, s"] / by_job,
            "TorchCrossValidator, two fits at a time / Spark's fitMultiple": median[
                "TorchCrossValidator, two fits at a time, s"
            ]
            / by_job,
            "rows read, TorchCrossValidator / rows": median["rows read, TorchCrossValidator / rows"],
            "TorchTuner, 16 trials / 16 warm fits": median["TorchTuner, 16 trials, s"] / fits,
            "TorchTuner, 16 trials / 16 processes": median["TorchTuner, 16 trials, s"]
            / median["16 processes, two at a time, s"],
            "TorchTuner with pruning / without": median["TorchTuner, 16 longer trials, pruned, s"]
            / median["TorchTuner, 16 longer trials, s"],
            "epochs with pruning / without": median["epochs, pruned"],
            "second fit on prepared rows - its loop, s": median["second fit on prepared rows - its loop, s"],
        },
        goals=GOALS,
        facts={"rows": rows, **machine("torch", "pyspark", "pyarrow", "numpy", "optuna")},
        path=options.json,
    )


if __name__ == "__main__":
    main()
