"""Programs in processes of their own, in the environment of a user's shell on loopback."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent

# A JVM maps the classes that `make` has archived. Without the file, or with another class path, it reads and verifies
# them one by one.
SHARED_CLASSES = f"-XX:SharedArchiveFile={Path(sys.prefix, 'spark.jsa')} -Xlog:disable"
# What the optimising compiler makes does not pay in a JVM that lives for a test or two.
BRIEF_JVM = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m {SHARED_CLASSES}"


def environment(**more: str) -> dict[str, str]:
    """The environment of a user's shell on loopback: nothing of this test's own Spark in it."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK", "PYSPARK", "_PYSPARK", "COV_"))}
    return {
        **inherited,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": str(SPARK_HOME),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        **more,
    }


def run_python(directory: Path, *arguments: str, seconds: float = 280, path: str = "") -> str:
    """Runs Python in `directory` and returns what it printed; shows the end of its errors if it fails."""
    env = environment(PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), path))))
    done = subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    shown = [line for line in done.stderr.splitlines() if not line.startswith("\tat ")]  # Java's frames hide the rest
    assert done.returncode == 0, "\n".join(shown)[-4000:]
    return done.stdout


@contextmanager
def connect_port() -> Iterator[None]:
    """Waits until no other test has a server of Spark Connect: `remote("local[n]")` always takes port 15002."""
    with Path(tempfile.gettempdir(), "sparktorch-tests-15002.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
