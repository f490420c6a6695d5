"""The executor report, and the expectations it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparktorch.base.config import Device

__all__ = ["ExecutorReport", "Expected"]


@dataclass(frozen=True, kw_only=True)
class ExecutorReport:
    """The report of one task; see `sparktorch.spark.checks.executor_probe.answer`.

    Attributes:
        rank: Number of the task.
        host: Host of the task, as Spark names it.
        executor: Executor of the task, as `host:port`.
        python: Version of its Python.
        executable: Path of its Python.
        packages: By package, its `version`, or the `error` of importing it.
        hostname: Host name of the machine, as it reports it.
        names: Addresses to which host names resolve there, its own included; without names that do not resolve.
        driver: Why it cannot reach the driver; `None` if it can, or did not try.
        shared_memory: Free bytes in /dev/shm; `None` if that does not exist.
        disks: Free bytes under each local directory; `None` if that does not exist.
        gpus: Addresses of the GPUs that Spark gave the task.
        cuda_visible_devices: Value of the variable that hides accelerators; `None` if not set.
        cuda: Number of accelerators that torch sees; `None` if torch was not asked or cannot say.
        gpu_uuids: UUIDs of the machine's GPUs, by index; empty if unknown.
        checkpoint: Why it cannot write a file to the checkpoint directory; `None` if it can.
        peers: Why it cannot reach other tasks, by a label of the task; `None` if it did not try.
        files: Ranks whose files it sees in the checkpoint directory; `None` if it did not look.
    """

    rank: int
    host: str
    executor: str
    python: str
    executable: str
    packages: dict[str, dict[str, str]]
    hostname: str
    names: dict[str, str]
    driver: str | None
    shared_memory: int | None
    disks: dict[str, int | None]
    gpus: list[str]
    cuda_visible_devices: str | None
    cuda: int | None
    gpu_uuids: list[str]
    checkpoint: str | None
    peers: dict[str, str] | None
    files: list[int] | None

    @property
    def place(self) -> dict[str, Any]:
        """Host and executor, for findings that concern all tasks of the executor."""
        return {"host": self.host, "executor": self.executor}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What executor reports are compared with.

    Attributes:
        packages: Packages of the driver, in the form of `ExecutorReport.packages`.
        pandas: Whether tasks need pandas, as before Spark 4.1.
        driver: Name or address at which executors reach the driver; `None` if rank 0 hosts the store.
        executors: Host names of the executors, as Spark knows them.
        towards: Returns the driver's local address on the route to a host.
        device: Device to train on.
        world_size: Number of ranks.
        checkpoint_dir: Directory for checkpoints, `None` for none.
    """

    packages: dict[str, dict[str, str]]
    pandas: bool = False
    driver: str | None
    executors: frozenset[str] = frozenset()
    towards: Callable[[str], str] = lambda host: ""
    device: Device = "auto"
    world_size: int = 1
    checkpoint_dir: str | None = None
