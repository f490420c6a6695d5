"""Hygiene of every ring in one place: a test leaves nothing behind, or it fails."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.programs import BRIEF_JVM
from tests.support.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 - hooks

_JOIN_SECONDS = 5.0
# The older stack leaves out what is about torch, or needs libraries that it lacks; of the rings of Spark, it has these.
_NEWEST = ("unit/train", "unit/distributed", "unit/cli", "unit/tracking", "unit/model/test_export.py")
_NEWEST += ("unit/test_", "unit/base", "unit/worker", "unit/model/test_layers.py", "unit/model/test_formats.py")
_NEWEST += ("unit/model/series", "unit/data/test_storage.py", "unit/ml/test_identity.py")
_ON_OLDER = {
    *("checks/test_errors.py", "frame/test_partition.py", "frame/test_petastorm.py", "frame/test_rows.py"),
    *(f"ml/test_{name}.py" for name in ("exactness", "fit", "persistence", "scoring")),
    *("test_paths.py", "test_shipping.py"),
}
_POOLS_OF_LIBRARIES = ("MlflowLocalArtifactRepository_",)  # idle until MLflow lets go of them
_SET_BY_LIBRARIES = {
    *("PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    *("TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
}

# torch's threads that wait for each other sleep: beside other processes they would spin longer than they compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["JAVA_TOOL_OPTIONS"] = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} {BRIEF_JVM}".strip()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out files that the older stack cannot run, or that show nothing new there."""
    if not version("pyspark").startswith("3.") or collection_path.is_dir():
        return None
    ring, _, name = collection_path.relative_to(Path(__file__).parent).as_posix().partition("/")
    of_spark = ring in ("spark", "paths") and collection_path.name.startswith("test_")
    return f"{ring}/{name}".startswith(_NEWEST) or (of_spark and name not in _ON_OLDER) or None


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaks environment variables, a process group, non-daemon threads or files."""
    environment, threads, files = _environment(), set(threading.enumerate()), _files()
    yield
    leaked = _changed(environment, _environment())
    assert not leaked, f"the test leaked environment variables: {leaked}"
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_initialized(), "the test leaked a process group"
    running = _running(set(threading.enumerate()) - threads)
    assert not running, f"the test leaked threads: {running}"
    assert _files() <= files, f"the test left files in the working directory: {_files() - files}"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _SET_BY_LIBRARIES}


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names only: values may be secrets."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _files() -> set[str]:
    """Names in the working directory; caches of tools are hidden and do not count."""
    return {entry.name for entry in os.scandir() if not entry.name.startswith((".", "__pycache__"))}


def _running(threads: set[threading.Thread]) -> list[str]:
    """Names of the threads that keep the interpreter alive; those about to end get a moment to."""
    deadline = time.monotonic() + _JOIN_SECONDS
    names = []
    for thread in threads:
        if not thread.daemon and not thread.name.startswith(_POOLS_OF_LIBRARIES):
            thread.join(max(0.0, deadline - time.monotonic()))
            names += [thread.name] if thread.is_alive() else []
    return names
