"""What an executor says of itself, and what that is measured against: two values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparktorch.base.config import Device

__all__ = ["ExecutorReport", "Expected"]


@dataclass(frozen=True, kw_only=True)
class ExecutorReport:
    """What one task says; see `sparktorch.spark.checks.executor_probe.answer`.

    Attributes:
        rank: The task's number.
        host: Its host, as Spark names it.
        executor: Its executor, as host and port.
        python: Version of its Python.
        executable: Path of its Python.
        packages: `version`, or the `error` of importing it, by package.
        hostname: What it calls itself.
        names: What names of hosts resolve to there, its own among them; without those that do not.
        driver: Why it does not reach the driver; `None` if it does, or was not to try.
        shared_memory: Bytes free in /dev/shm; `None` where there is none.
        disks: Bytes free under each local directory; `None` where it does not exist.
        gpus: The addresses of the GPUs that Spark gave it.
        cuda_visible_devices: That variable; `None` where it is not set.
        cuda: How many accelerators torch sees; `None` if it was not asked or cannot say.
        gpu_uuids: UUIDs of the machine's GPUs, by index; empty where they are not known.
        checkpoint: Why it cannot keep a file in the directory for checkpoints; `None` if it can.
        peers: Why it does not reach other tasks, by what they are; `None` if it did not try.
        files: Ranks whose files it sees in that directory; `None` if it did not look.
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
        """The executor, for what all of its tasks share."""
        return {"host": self.host, "executor": self.executor}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the answers are measured against.

    Attributes:
        packages: The driver's, in the form of `ExecutorReport.packages`.
        pandas: Whether tasks need pandas, as they do before Spark 4.1.
        driver: Name or address by which the driver is reached; `None` where rank 0 hosts the store.
        executors: Names of the executors' hosts, as Spark knows them.
        towards: Returns the driver's address on the way to a host.
        device: What the ranks are to train on.
        world_size: Number of ranks.
        checkpoint_dir: Where checkpoints are to go.
    """

    packages: dict[str, dict[str, str]]
    pandas: bool = False
    driver: str | None
    executors: frozenset[str] = frozenset()
    towards: Callable[[str], str] = lambda host: ""
    device: Device = "auto"
    world_size: int = 1
    checkpoint_dir: str | None = None
