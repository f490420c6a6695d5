"""What MLflow warns about by itself, for the tests to overhear; a server of a model, and what it answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.programs import ROOT
from tests.support.proxy import free_port
from tests.support.waiting import until

# Marks for the tests that use MLflow.
QUIET = [
    # MLflow's SQLAlchemy store leaves its connections to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <sqlite3:pytest.PytestUnraisableExceptionWarning"),
    # MLflow warns about its own type hints when mlflow.pyfunc is imported.
    pytest.mark.filterwarnings("ignore:.*is inferred as AnyType:UserWarning"),
    # MLflow 3.17 against the pydantic, SQLAlchemy and Alembic of today.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def answers(url: str) -> bool:
    """Returns whether a server answers there, and has nothing to complain of."""
    try:
        return requests.get(url, timeout=5).ok
    except requests.RequestException:
        return False


@contextmanager
def serving(path: str, log: Path) -> Iterator[str]:
    """Serves a model for the block, in a process of its own; yields the address for rows."""
    port = free_port()
    command = ["-m", "mlflow", "models", "serve", "-m", path, "-p", str(port), "-h", "127.0.0.1", "--env-manager=local"]
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, *command],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                # MLflow starts its server by name, which is found only where this environment is active.
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            },
        )
    try:
        ping = f"http://127.0.0.1:{port}/ping"
        until(lambda: server.poll() is not None or answers(ping), seconds=90, what=lambda: log.read_text()[-3000:])
        assert server.poll() is None, log.read_text()[-3000:]
        yield f"http://127.0.0.1:{port}/invocations"
    finally:
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answer(address: str, body: dict[str, Any]) -> list[Any]:
    """Returns the predictions that a server of a model answers with."""
    answered = requests.post(address, json=body, timeout=120)
    assert answered.ok, answered.text
    found: list[Any] = answered.json()["predictions"]
    return found
