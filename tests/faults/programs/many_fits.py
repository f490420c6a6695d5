"""Fits again and again in one session, then many at once, and says as JSON what came out and what is held."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
from pyspark.sql import DataFrame, SparkSession

from sparktorch import Callback, TorchRegressor
from sparktorch.ml.fit.prepared_data import PreparedData
from sparktorch.train.callbacks import FitContext
from tests.support.nets import Score
from tests.support.waiting import until

__all__ = ["main"]

WARM = 12  # fits, after which every process has all that it will ever import
SEEDS = 20
_END_OF_TASK = 1.0  # seconds; a rank hands back its result before it has closed the task's connections


class When(Callback):
    """Notes when each rank's training begins and ends."""

    ranks = "all"

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_fit_start(self, context: FitContext) -> None:
        self._note(context, "begin")

    def on_fit_end(self, context: FitContext) -> None:
        self._note(context, "end")

    def _note(self, context: FitContext, what: str) -> None:
        (self._folder / f"{what}-{context.world.rank}").write_text(repr(time.monotonic()))


def fit(data: DataFrame | PreparedData, seed: int, **params: Any) -> str:
    """Fits on one rank, unless `params` say otherwise, and returns a hash of the weights."""
    values = {"module": Score, "batchSize": 64, "numWorkers": 1, "progress": False, "seed": seed, **params}
    model = TorchRegressor(**values).fit(data)
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.module.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


def _asks_for_names() -> bool:
    """Whether a process has a UDP socket: torch asks a name server for the name of each peer of a store."""
    driver = psutil.Process()
    for process in (driver, *driver.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            if "java" not in process.name() and process.net_connections("udp"):
                return True
    return False


def holdings(spark: SparkSession) -> dict[str, dict[str, float]]:
    """Returns what driver, JVM and Python workers hold between fits; memory is their own, in MiB."""
    time.sleep(_END_OF_TASK)
    until(lambda: not _asks_for_names(), seconds=60, what="an answer of the name server")
    time.sleep(_END_OF_TASK)  # who has waited for one closes the task's connections only now
    driver = psutil.Process()
    groups: dict[str, list[psutil.Process]] = {"driver": [driver], "jvm": [], "workers": []}
    for process in driver.children(recursive=True):
        groups["jvm" if "java" in process.name() else "workers"].append(process)
    gc.collect()
    runtime = spark.sparkContext._jvm.Runtime.getRuntime()
    runtime.gc()
    held = {
        name: {
            "processes": len(processes),
            "threads": sum(process.num_threads() for process in processes),
            "files": sum(process.num_fds() for process in processes),
            # Of forked processes the resident memory counts the parent's too.
            "memory": round(sum(process.memory_full_info().uss for process in processes) / 2**20, 1),
        }
        for name, processes in groups.items()
    }
    # Whether the collector follows a tuple depends on when it last looked: their number moves by hundreds.
    held["driver"]["objects"] = sum(type(one) is not tuple for one in gc.get_objects())
    held["jvm"]["heap"] = round((runtime.totalMemory() - runtime.freeMemory()) / 2**20, 1)
    return held


def on_held_rows(
    spark: SparkSession, data: DataFrame, expected: dict[int, str], fits: int
) -> list[dict[str, dict[str, float]]]:
    """Fits again and again on rows that one rank holds; returns what is held before and after."""
    found = []
    with TorchRegressor(module=Score, numWorkers=1).prepare(data) as rows:
        for number in range(WARM + fits + 1):
            if number in (WARM, WARM + fits):
                found.append(holdings(spark))
            assert fit(rows, number % SEEDS) == expected[number % SEEDS]
    return found


def main(fits: int, rest: float, folder: Path) -> dict[str, Any]:
    """Fits."""
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    x = np.random.default_rng(0).normal(size=(200, 5))
    data = spark.createDataFrame(pd.DataFrame({"features": list(x), "label": x.sum(1)}))
    one_by_one = {}
    for number in range(WARM + fits):
        if number == WARM:
            time.sleep(rest)
            fit(data, 0)  # of idle Python workers, Spark has ended some
            before, started = holdings(spark), time.perf_counter()
        weights = fit(data, number % SEEDS)
        assert one_by_one.setdefault(number % SEEDS, weights) == weights
    seconds = (time.perf_counter() - started) / fits
    time.sleep(rest)
    fit(data, 0)
    after = holdings(spark)

    held = on_held_rows(spark, data, one_by_one, 5 * fits)

    with ThreadPoolExecutor(SEEDS) as pool:
        at_once = list(pool.map(lambda seed: fit(data, seed), range(SEEDS)))
    assert at_once == [one_by_one[seed] for seed in range(SEEDS)]

    # Each wants both slots.
    folders = [folder / name for name in ("first", "second")]
    with ThreadPoolExecutor(2) as pool:
        for one in folders:
            one.mkdir()
        both = list(pool.map(lambda one: fit(data, 0, numWorkers=2, epochs=20, callbacks=[When(str(one))]), folders))
    assert both[0] == both[1]
    times = [{path.name: float(path.read_text()) for path in one.iterdir()} for one in folders]
    first, second = sorted(times, key=lambda one: one["begin-0"])
    assert max(first["end-0"], first["end-1"]) < min(second["begin-0"], second["begin-1"])

    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("sparktorch")]
    spark.stop()
    return {"before": before, "after": after, "held": held, "seconds": round(seconds, 3), "threads": threads}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))))
