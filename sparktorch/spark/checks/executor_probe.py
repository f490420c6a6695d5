"""Makes the executor report, in which a task says what its executor has and can reach.

`answer` runs in tasks, and the code of this module is pickled by value. It must not need this package or torch on the
executors, since the report says whether they are installed. So it imports only the standard library, and other packages
where they are used. What cannot be found out is reported as `None` or as the reason why, never raised.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from sparktorch.distributed.addresses import address_towards, host_of

__all__ = [
    "ANSWER_SCHEMA",
    "WriteTrial",
    "answer",
    "digest_of",
    "failure_to_reach",
    "greeting",
    "package",
    "packages",
    "problem",
    "within",
]

ANSWER_SCHEMA = "answer string"

# The packages whose versions are reported.
_PACKAGES = ("torch", "numpy", "pyarrow", "safetensors", "sparktorch")
_SECONDS = 5.0  # A connection must be made within this time.
# A file system must answer within this time.
_STORAGE_SECONDS = 30.0


def answer(
    batches: Iterable[Any],
    *,
    token: str,
    driver: tuple[str, int] | None,
    checkpoint_dir: str | None,
    gpus: bool,
    meet: bool,
) -> Iterator[Any]:
    """Yields a record batch of one row: the executor report of this task, as JSON.

    The driver and the other tasks send `token` to every connection. With `meet`, the other tasks' sockets and files are
    checked, too, which adds two barriers of about one second each.
    """
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    # Spark would not reuse a worker that leaves input unread.
    for _ in batches:
        pass
    context: Any = BarrierTaskContext.get()
    rank = context.partitionId()
    executor = context.getTaskInfos()[rank].address
    gpu_resource = context.resources().get("gpu")
    local_dirs = [path for path in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if path]
    facts: dict[str, Any] = {
        "rank": rank,
        "host": host_of(executor),
        "executor": executor,
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": packages(),
        "driver": failure_to_reach(*driver, token) if driver else None,
        "shared_memory": _free("/dev/shm"),
        "disks": {path: _free(path) for path in [*local_dirs, tempfile.gettempdir()]},
        "gpus": gpu_resource.addresses if gpu_resource else [],
        "cuda": None,
        "cuda_visible_devices": None,
        "gpu_uuids": [],
        "peers": None,
        "files": None,
    }
    if gpus:
        facts.update(_gpus())
    trial = WriteTrial(checkpoint_dir, f".sparktorch-doctor-{token}", rank) if checkpoint_dir else None
    facts["checkpoint"] = problem(trial.write) if trial else None
    try:
        if meet:
            facts["peers"], facts["files"] = _meet_others(context, facts["host"], token, driver, trial)
    finally:
        if trial:
            problem(trial.remove)
    yield pa.RecordBatch.from_pydict({"answer": [json.dumps(facts)]})


def packages() -> dict[str, dict[str, str]]:
    """Returns what `package` returns, for each package that ranks use; for sparktorch also `code`, a digest."""
    versions = {name: package(name) for name in _PACKAGES}
    # Importing pandas would take half a second.
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["pandas"] = {"version": importlib.metadata.version("pandas")}
    if "version" in versions["sparktorch"]:
        versions["sparktorch"]["code"] = digest_of("sparktorch")
    return versions


def package(name: str) -> dict[str, str]:
    """Returns the `version` of a package, or the `error` of importing it."""
    try:
        return {"version": str(importlib.import_module(name).__version__)}
    except Exception as error:  # An import may raise anything.
        return {"error": f"{type(error).__name__}: {error}"}


def digest_of(package: str) -> str:
    """Returns a digest of a package's source files, whether they are in a folder or an archive."""
    digest = hashlib.sha256()

    def add(folder: Any, prefix: str) -> None:
        for entry in sorted(folder.iterdir(), key=lambda entry: str(entry.name)):
            if entry.name.endswith(".py"):
                digest.update(f"{prefix}{entry.name}\0".encode() + entry.read_bytes())
            elif entry.is_dir() and entry.name != "__pycache__":
                add(entry, f"{prefix}{entry.name}/")

    add(importlib.resources.files(package), "")
    return digest.hexdigest()[:16]


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Calls in a thread and returns the result; raises the call's exception, or a `TimeoutError` if it goes on."""
    outcome = concurrent.futures.Future[Any]()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not concurrent.futures.wait([outcome], seconds).done:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return outcome.result()


def problem(call: Callable[[], Any]) -> str | None:
    """Runs a call to a file system; returns why it fails, or `None` if it succeeds."""
    try:
        within(_STORAGE_SECONDS, call)
    except Exception as error:  # A file system may raise anything.
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def greeting(bind: str, token: str) -> Iterator[int]:
    """Listens on a free port of an address, yields the port, and sends the token to every connection."""
    family, _, _, _, address = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family, backlog=1024) as listener:

        def greet() -> None:
            with suppress(OSError):  # The listener was closed.
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.sendall(token.encode())

        thread = threading.Thread(target=greet, name="sparktorch-doctor", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # It wakes the thread, which `close` alone does not.
            thread.join()


def failure_to_reach(host: str, port: int, token: str) -> str | None:
    """Returns why the token cannot be received from `host`; `None` if it can."""
    try:
        connection = socket.create_connection((host, port), timeout=_SECONDS)
        with connection, connection.makefile("rb") as content:
            received = content.read(len(token))
    except (OSError, UnicodeError) as error:
        return str(error)
    return None if received == token.encode() else "something else answers there"


def _free(path: str) -> int | None:
    """Returns the free bytes under a path; `None` if it does not exist."""
    with suppress(OSError):
        return shutil.disk_usage(path).free
    return None


def _gpus() -> dict[str, Any]:
    """Returns what a rank would see of the machine's accelerators, and their UUIDs in the order of `nvidia-smi`."""
    gpus: dict[str, Any] = {}
    with suppress(Exception):  # `packages` reports torch or this package if it is missing.
        from sparktorch.base.devices import accelerator, device_count, visible_devices

        gpus = {"cuda": device_count(), "cuda_visible_devices": visible_devices(accelerator() or "cuda")}
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        gpus["gpu_uuids"] = listed.stdout.split()
    return gpus


class WriteTrial:
    """A test file of this task in the checkpoint directory, or in its nearest existing parent directory."""

    def __init__(self, url: str, name: str, rank: int) -> None:
        """Takes the directory and the name without the rank; writes nothing."""
        self._url = url
        self._name = name
        self._rank = rank
        # The file system and the directory of the file, once it is written.
        self._fs: Any = None
        self._root = ""

    def write(self) -> None:
        """Writes the file and reads it back."""
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self._fs, root = fsspec.core.url_to_fs(self._url)
        self._root = root.rstrip("/")
        # Other file systems need no directories. Where a file can be written, a directory can be made.
        if isinstance(self._fs, LocalFileSystem):
            while self._root and not os.path.exists(self._root):
                self._root = os.path.dirname(self._root)
        content = uuid.uuid4().bytes
        self._fs.pipe_file(self._path, content)
        self._fs.invalidate_cache()
        if self._fs.cat_file(self._path) != content:
            raise OSError("what was read is not what was written")

    def ranks(self) -> list[int]:
        """Returns the ranks whose test files are visible."""
        self._fs.invalidate_cache()
        names = [entry.rstrip("/").rpartition("/")[2] for entry in self._fs.ls(self._root, detail=False)]
        return [int(name.rpartition("-")[2]) for name in names if name.startswith(f"{self._name}-")]

    def remove(self) -> None:
        """Removes the file."""
        if self._fs is not None:
            self._fs.rm_file(self._path)

    @property
    def _path(self) -> str:
        return f"{self._root}/{self._name}-{self._rank}"


def _meet_others(
    context: Any, host: str, token: str, driver: tuple[str, int] | None, trial: WriteTrial | None
) -> tuple[dict[str, str], list[int] | None]:
    """Returns which other tasks cannot be reached, each with the reason, and which ranks' files are visible.

    A task tries to reach its neighbour, and rank 0 if that is to host the store.
    """
    rank = context.partitionId()
    bind = address_towards(driver[0]) if driver else host
    unreached: dict[str, str] = {}
    files: list[int] | None = None
    with ExitStack() as open_socket:
        port = 0
        try:
            port = open_socket.enter_context(greeting(bind, token))
        except OSError as error:
            unreached[f"its own address {bind}"] = str(error)
        offers = [json.loads(offer) for offer in context.allGather(json.dumps([bind, port]))]
        peers = {(rank + 1) % len(offers)}
        if driver is None:
            peers.add(0)
        for peer in sorted(peers - {rank}):
            peer_address, peer_port = offers[peer]
            # A task that could not listen offers port 0, and reports the reason itself.
            failure = failure_to_reach(peer_address, peer_port, token) if peer_port else None
            if failure is not None:
                unreached[f"rank {peer} at {peer_address}"] = failure
        with suppress(Exception):
            files = within(_STORAGE_SECONDS, trial.ranks) if trial else None
        # Until all tasks have looked, none may close its socket or remove its file.
        context.barrier()
    return unreached, files
