"""What the benchmarks share: arguments, interleaved medians, a quiet Spark session, the report.

A benchmark measures both of its sides in one run and prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pyspark.sql import SparkSession

__all__ = [
    "Goal",
    "arguments",
    "interleave",
    "machine",
    "printed",
    "report",
    "run_process",
    "seconds",
    "session",
    "spread",
    "taking_turns",
    "touch_memory",
    "workspace",
]

ROOT = Path(__file__).resolve().parent.parent

T = TypeVar("T")

# On a busy machine, a process of a peer may abort at its end with this message.
_ABORTED = "terminate called without an active exception"
_MOST_REPEATED = 5  # A benchmark measures at most so many samples again.
_repeated: list[list[str]] = []  # These are the commands of the samples that were measured again.


@dataclass(frozen=True)
class Goal:
    """A bound on a measured number.

    Attributes:
        bound: The number to keep to.
        at_least: Whether more is better; otherwise less is.
    """

    bound: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        """Whether `value` keeps to the bound."""
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


def arguments(doc: str, add: Callable[[argparse.ArgumentParser], None] = lambda parser: None) -> argparse.Namespace:
    """Parses `--quick` and `--json PATH`, and what `add` adds."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small data and few rounds, to see that it works")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the JSON object to this file")
    add(parser)
    return parser.parse_args()


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs every side once a round, every other round in reverse, and collects what they return.

    Each sample is shown as it comes: of a benchmark that is cut off, what it has measured remains. Warm the sides up
    before.
    """
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds):
        for name in list(sides)[:: -1 if index % 2 else 1]:
            samples[name].append(sides[name]())
            print(f"{name}: {samples[name][-1]:.5g}", file=sys.stderr, flush=True)
    return samples


def touch_memory() -> None:
    """Takes memory and frees it: a virtual machine whose host has taken back what was free waits here for it."""
    np.ones(1 << 28, np.uint8)


def seconds(function: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def spread(samples: Iterable[float]) -> dict[str, float]:
    """Returns median, least and greatest of the samples, and how many there are."""
    values = sorted(samples)
    return {"median": statistics.median(values), "min": values[0], "max": values[-1], "n": len(values)}


def machine(*packages: str) -> dict[str, Any]:
    """Returns commit, date, cores, platform, load and the versions of Python and of `packages`."""
    return {
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "load": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages},
    }


def _commit() -> str:
    """Returns what is measured; "+" behind a commit says that files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "sparktorch", "benchmarks/*.py"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # A copy may have no history.
        return "unknown"
    return head.stdout.strip() + "+" * bool(changed.stdout)


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """Yields a temporary directory; processes of the block import this checkout, and talk over loopback."""
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *inherited]),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }
    with tempfile.TemporaryDirectory(prefix="sparktorch-bench-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@contextlib.contextmanager
def session(work: Path, *, cores: int = 2, master: str = "", **settings: str) -> Iterator[SparkSession]:
    """Yields a session on loopback, without UI or progress bars, with its files under `work`.

    Args:
        work: From `workspace`.
        cores: Number of task slots.
        master: By default, `local[cores]`.
        **settings: Further settings, with `__` in place of the dots.
    """
    builder = SparkSession.builder.master(master or f"local[{cores}]").appName("benchmark")
    fixed = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "4g",
        "spark.local.dir": str(work / "spark"),
        "spark.sql.warehouse.dir": str(work / "warehouse"),
    }
    for name, value in {**fixed, **{name.replace("__", "."): value for name, value in settings.items()}}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.range(1).count()
    try:
        yield spark
    finally:
        spark.stop()


def run_process(command: list[str], *, timeout: float = 600) -> tuple[float, str]:
    """Runs a command to its end; returns its wall seconds and its standard output.

    One that aborted at its end is run again; `report` counts that.

    Raises:
        RuntimeError: It failed, or took longer than `timeout`; with the end of its output.
    """
    try:
        return _run_once(command, timeout)
    except RuntimeError as error:
        if _ABORTED not in str(error) or len(_repeated) == _MOST_REPEATED:
            raise
    _repeated.append(command)
    return run_process(command, timeout=timeout)


def _run_once(command: list[str], timeout: float) -> tuple[float, str]:
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # The group has the process and its children.
        process.communicate()
        raise
    wall = time.perf_counter() - started
    if process.returncode:
        aborted = f"{_ABORTED}\n" if _ABORTED in err else ""  # torchrun may print much after it.
        raise RuntimeError(
            f"{' '.join(command)} failed with {process.returncode}:\n{aborted}{out[-2000:]}\n{err[-4000:]}"
        )
    return wall, out


@contextlib.contextmanager
def taking_turns(
    command: list[str], log: Path, settings: Mapping[str, str] | None = None
) -> Iterator[Callable[[], dict[str, float]]]:
    """Starts a process that answers every line of its input with a line of JSON; yields what makes it do so.

    Args:
        command: The process.
        log: Where its errors go.
        settings: Its environment, if not that of this process.

    Raises:
        RuntimeError: It has ended; with the end of its errors.
    """
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=settings,
            start_new_session=True,
        )

    def turn() -> dict[str, float]:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("go\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(command)} has ended:\n{log.read_text()[-3000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer

    try:
        yield turn
    finally:
        try:
            process.communicate(timeout=20)  # The process ends once its input has ended.
        except (subprocess.TimeoutExpired, BrokenPipeError):
            os.killpg(process.pid, signal.SIGKILL)  # The group has the process and its JVM.
            process.communicate()


def printed(show: Callable[[], T]) -> tuple[T, str]:
    """Calls what prints a table, and returns its result and the table, which `benchmarks.tables` puts on the page."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        result = show()
    print(text.getvalue(), end="")
    return result, text.getvalue().strip("\n")


def report(
    benchmark: str,
    *,
    samples: Mapping[str, Iterable[float]],
    ratios: Mapping[str, float],
    goals: Mapping[str, Goal],
    facts: Mapping[str, Any],
    path: Path | None = None,
) -> None:
    """Prints a table for people and, as the last line, one JSON object; writes that to `path`, too.

    Args:
        benchmark: Its name.
        samples: All measurements by name; medians and spreads come from them.
        ratios: What is compared with the goals.
        goals: A goal for every ratio that has one.
        facts: From `machine`, and whatever else belongs to the result.
        path: Where to write the JSON object.
    """
    spreads = {name: spread(values) for name, values in samples.items()}
    width = max(map(len, [*spreads, *ratios])) + 2
    print(f"\n{benchmark}\n{'':{width}}{'median':>10}{'min':>10}{'max':>10}{'n':>4}")
    for name, figures in spreads.items():
        cells = "".join(f"{figures[column]:10.4g}" for column in ("median", "min", "max"))
        print(f"{name:{width}}{cells}{figures['n']:4d}")
    print()
    for name, value in ratios.items():
        verdict = f"{goals[name]!s:>10}  {'met' if goals[name].met(value) else 'MISSED'}" if name in goals else ""
        print(f"{name:{width}}{value:10.3f}{verdict}")
    result = {
        "benchmark": benchmark,
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "goals": {name: str(goal) for name, goal in goals.items()},
        "met": all(goal.met(ratios[name]) for name, goal in goals.items()),
        "medians": {name: round(figures["median"], 5) for name, figures in spreads.items()},
        "spreads": {name: [round(figures["min"], 5), round(figures["max"], 5)] for name, figures in spreads.items()},
        "repeated samples": len(_repeated),
        **facts,
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{json.dumps(result)}", flush=True)
