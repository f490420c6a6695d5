"""Programs in processes of their own, in the environment of a user's shell on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark

__all__ = ["ROOT", "SPARK_HOME", "environment", "run_python"]

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent


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


def run_python(directory: Path, *arguments: str, seconds: float = 180) -> str:
    """Runs Python in `directory` and returns what it printed; shows the end of its errors if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment(),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
