"""Wall time of a whole fit on two ranks, beside `torchrun` and `TorchDistributor` with a hand-written script.

400,000 rows of 100 float32 in Parquet, MLP 100-256-1, AdamW, 3 epochs, batches of 1,024 rows, CPU and Gloo.
A fit is timed from `spark.read` to the model in hand. Warm means that the same side has just run, untimed: Spark
ends Python workers that idle for a minute, and the sides push each other out of the page cache. Cold: a fresh process
that starts a session and fits, or starts a session and then runs `torchrun`, from the start of its interpreter to its
end. A one-step fit is that of 100 rows.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import DataFrame, SparkSession

from benchmarks import by_hand
from benchmarks.common import Goal, arguments, interleave, machine, report, run_process, seconds, session, workspace
from sparktorch import TorchRegressionModel, TorchRegressor

RANKS = 2
BATCH = 1024
EPOCHS = 3
FILES = 8
GOALS = {
    "fit / torchrun": Goal(0.6),
    "fit / TorchDistributor": Goal(0.35),
    "cold fit / torchrun, each with its session": Goal(1.1),
    "one-step fit, s": Goal(0.7),
    "rendezvous, s": Goal(0.05),
    "no-op TorchDistributor / one-step fit": Goal(10, at_least=True),
    "loop per step / by hand": Goal(1.05),
}

_COLD_TORCHRUN = """
from pathlib import Path
from tempfile import TemporaryDirectory
from benchmarks.common import run_process, session
with TemporaryDirectory() as work, session(Path(work), cores={ranks}):
    run_process({command})
"""


def write_rows(directory: Path, rows: int, files: int) -> None:
    """Writes `rows` random rows as Parquet; the label is a function of the features, with noise."""
    directory.mkdir()
    random = np.random.default_rng(7)
    for number in range(files):
        features = random.standard_normal((rows // files, by_hand.WIDTH), np.float32)
        label = np.sin(features[:, 0]) + features[:, 1] * features[:, 2]
        offsets = np.arange(0, features.size + 1, by_hand.WIDTH, dtype=np.int32)
        columns = {
            "features": pa.ListArray.from_arrays(pa.array(offsets), pa.array(features.reshape(-1))),
            "label": pa.array(label + 0.1 * random.standard_normal(len(label), np.float32)),
        }
        pq.write_table(pa.table(columns), directory / f"part-{number:03d}.parquet")


def estimator(*, batch: int, epochs: int) -> TorchRegressor:
    """Returns the estimator with the settings of the hand-written script."""
    return TorchRegressor(
        module=by_hand.MLP,
        learningRate=by_hand.LEARNING_RATE,
        batchSize=batch,
        epochs=epochs,
        numWorkers=RANKS,
        device="cpu",
        progress=False,
    )


class Sides:
    """The sides of the comparison; each returns its seconds and notes what else it learned."""

    def __init__(self, spark: SparkSession, work: Path, data: Path) -> None:
        self.noted: dict[str, list[float]] = {"loop per step, ms": [], "loop per step by hand, ms": []}
        self._spark = spark
        self._work = work
        self._data = data

    def fit(self) -> float:
        """Fits in a warm session."""
        models: list[TorchRegressionModel] = []
        wall = seconds(lambda: models.append(fit(self._spark, self._data)))
        summary = models[0].summary
        training = sum(record["seconds"] for record in summary.history)
        self._note("loop per step, ms", 1000 * training / summary.totalIterations)
        self._note("loss", summary.history[-1]["loss"])
        for name in ("prepare", "job", "rank0.load", "rank0.wait", "rank0.train"):
            self._note(f"fit: {name}", summary.seconds[name])
        return wall

    @property
    def _torchrun(self) -> list[str]:
        """The command that runs the hand-written script."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        script = [by_hand.__file__, str(self._data), str(self._work / "state.pt"), str(EPOCHS), str(BATCH // RANKS)]
        return launch + script

    def torchrun(self) -> float:
        """Runs the hand-written script under `torchrun`."""
        wall, out = run_process(self._torchrun)
        result = json.loads(out.splitlines()[-1])
        self._note("loop per step by hand, ms", 1000 * result["loop"] / result["steps"])
        self._note("loss by hand", result["loss"])
        return wall

    def distributor(self) -> float:
        """Runs the body of that script under `TorchDistributor`."""
        launch = TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)
        script = (str(self._data), str(self._work / "state.pt"), EPOCHS, BATCH // RANKS)
        return seconds(lambda: launch.run(by_hand.train, *script))

    def cold(self) -> float:
        """Runs a fresh process that starts a session and fits."""
        call = f"from benchmarks.fit_wall import cold_fit; cold_fit({str(self._data)!r})"
        wall, printed = run_process([sys.executable, "-c", call])
        self._note("the fit of a cold process, s", float(printed.splitlines()[-1]))
        return wall

    def cold_torchrun(self) -> float:
        """Runs a fresh process that starts a session and runs `torchrun`; it imports neither torch nor this package."""
        return run_process([sys.executable, "-c", _COLD_TORCHRUN.format(ranks=RANKS, command=self._torchrun)])[0]

    def noop_distributor(self) -> float:
        """Runs `TorchDistributor` with nothing to do."""
        launch = TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)
        return seconds(lambda: launch.run(by_hand.nothing))

    def one_step(self, rows: DataFrame) -> float:
        """Fits one step in a warm session."""
        models: list[TorchRegressionModel] = []
        wall = seconds(lambda: models.append(estimator(batch=100, epochs=1).fit(rows)))
        laps = models[0].summary.seconds
        self._note("rendezvous, s", laps["rank0.connect"] + laps["rank0.group"])
        for name in ("prepare", "job", "rank0.train"):
            self._note(f"one-step fit: {name}", laps[name])
        return wall

    def warm(self, side: Callable[[], float]) -> float:
        """Runs a side twice and returns the second run's seconds."""
        noted = {name: list(values) for name, values in self.noted.items()}
        side()
        self.noted = noted
        return side()

    def forget(self) -> None:
        """Forgets what was noted while warming up."""
        self.noted.clear()

    def _note(self, name: str, value: float) -> None:
        self.noted.setdefault(name, []).append(value)


def fit(spark: SparkSession, data: Path) -> TorchRegressionModel:
    """Reads and fits."""
    return estimator(batch=BATCH, epochs=EPOCHS).fit(spark.read.parquet(str(data)))


def cold_fit(data: str) -> None:
    """Prints the seconds of the first fit in a fresh session; called in a process of its own."""
    with TemporaryDirectory() as work, session(Path(work), cores=RANKS) as spark:
        print(seconds(lambda: fit(spark, Path(data))), flush=True)


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    rows, rounds, one_steps = (40_000, 2, 5) if options.quick else (400_000, 5, 11)
    with workspace() as work:
        write_rows(work / "data", rows, FILES)
        write_rows(work / "hundred", 100, 1)
        with session(work, cores=RANKS) as spark:
            hundred = spark.read.parquet(str(work / "hundred"))
            sides = Sides(spark, work, work / "data")
            for _ in range(2):
                sides.fit()
                sides.one_step(hundred)
            sides.torchrun()
            sides.distributor()
            sides.forget()
            samples = interleave(
                {
                    "fit, s": lambda: sides.warm(sides.fit),
                    "torchrun, s": lambda: sides.warm(sides.torchrun),
                    "TorchDistributor, s": lambda: sides.warm(sides.distributor),
                    "cold fit with its session, s": sides.cold,
                    "cold torchrun with a session, s": sides.cold_torchrun,
                    "no-op TorchDistributor, s": sides.noop_distributor,
                },
                rounds,
            )
            samples |= interleave({"one-step fit, s": lambda: sides.one_step(hundred)}, one_steps)
    samples |= sides.noted
    median = {name: statistics.median(values) for name, values in samples.items()}
    report(
        "fit_wall",
        samples=samples,
        ratios={
            "fit / torchrun": median["fit, s"] / median["torchrun, s"],
            "fit / TorchDistributor": median["fit, s"] / median["TorchDistributor, s"],
            "cold fit / torchrun, each with its session": median["cold fit with its session, s"]
            / median["cold torchrun with a session, s"],
            "cold fit / torchrun": median["the fit of a cold process, s"] / median["torchrun, s"],
            "one-step fit, s": median["one-step fit, s"],
            "rendezvous, s": median["rendezvous, s"],
            "no-op TorchDistributor / one-step fit": median["no-op TorchDistributor, s"] / median["one-step fit, s"],
            "loop per step / by hand": median["loop per step, ms"] / median["loop per step by hand, ms"],
        },
        goals=GOALS,
        facts={"rows": rows, **machine("torch", "pyspark", "pyarrow", "numpy")},
        path=options.json,
    )


if __name__ == "__main__":
    main()
