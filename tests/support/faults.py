"""What goes wrong in one rank, said in a line: `Fault("kill", rank=1, step=5)`."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from pyspark import BarrierTaskContext

from sparktorch import Callback
from sparktorch.train.callbacks import FitContext

__all__ = ["PLACES", "Fault", "can_limit_memory", "gone", "pids"]

Deed = Literal["kill", "stop", "hang", "raise", "exit", "slow", "kill executor", "fill memory", "say"]

# Where memory is limited, in the two versions of control groups.
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)

# What a rank calls when it begins a phase of its life.
PLACES = {
    "loading": "sparktorch.worker:Shard",
    "waiting": "sparktorch.train.link:Link.agree",
    "rendezvous": "torch.distributed:init_process_group",
    "validating": "sparktorch.train.validation:Validation.run",
    "saving": "sparktorch.train.checkpoint:CheckpointStore.write_share",
    "finishing": "sparktorch.worker:pack_state",
}


class Fault(Callback):
    """Does something to one rank, once: after a step, or as it begins a phase.

    Every rank writes its process id and a mark into a folder, and the faulty one when it happened.
    """

    ranks = "all"
    words = "about to fail"

    def __init__(
        self,
        deed: Deed,
        marks: Path,
        *,
        rank: int = 1,
        step: int = 0,
        at: str = "",
        times: int = 1,
        seconds: float = 0.05,
    ) -> None:
        self._deed, self._marks, self._rank, self._step, self._at = deed, marks, rank, step, at
        self._times, self._seconds = times, seconds
        marks.mkdir(parents=True, exist_ok=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Lays the ambush where a rank unpickles its work."""
        self.__dict__.update(state)
        context = BarrierTaskContext.get()
        if not isinstance(context, BarrierTaskContext) or "pyspark" not in sys.modules:
            return
        rank = context.partitionId()
        with (self._marks / "pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        if self._at and rank == self._rank:
            self._lie_in_wait(PLACES[self._at])

    def on_step_end(self, context: FitContext) -> None:
        if self._at or context.world.rank != self._rank:
            return
        if self._deed == "slow" or context.step == self._step:
            self._do()

    def _lie_in_wait(self, place: str) -> None:
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *holders, name = path.split(".")
        for holder in holders:
            owner = getattr(owner, holder)
        honest = getattr(owner, name)

        @wraps(honest)
        def faulty(*arguments: Any, **named: Any) -> Any:
            setattr(owner, name, honest)  # this process may be used again
            self._do()
            return honest(*arguments, **named)

        setattr(owner, name, faulty)

    def _do(self) -> None:
        if self._deed == "slow":
            time.sleep(self._seconds)
            return
        done = self._marks / "done"
        if done.exists() and len(done.read_text().splitlines()) >= self._times:
            return
        with done.open("a") as file:
            file.write(f"{time.time()}\n")
        print(self.words, flush=True)
        if self._deed == "kill executor":
            os.kill(_executor(), signal.SIGKILL)
        if self._deed in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self._deed == "kill" else signal.SIGSTOP)
        if self._deed == "say":
            logging.getLogger("mine").warning("careful, %d", self._rank)
        if self._deed == "fill memory":
            _fill_memory()
        if self._deed == "hang":
            (self._marks / "hung").write_text(str(os.getpid()))
            time.sleep(1000)
        if self._deed == "exit":
            os._exit(3)
        if self._deed == "raise":
            raise ArithmeticError("planted")


def pids(marks: Path) -> set[int]:
    """Returns the process ids of all ranks that have begun."""
    return {int(line) for line in (marks / "pids").read_text().split()}


def gone(processes: set[int], *, seconds: float) -> bool:
    """Whether all of the processes end within so many seconds."""
    deadline = time.monotonic() + seconds
    while left := {pid for pid in processes if _runs(pid)}:
        if time.monotonic() > deadline:
            print(f"still there: {left}")
            return False
        time.sleep(0.1)
    return True


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def can_limit_memory() -> bool:
    """Whether this process may put others under a limit of memory."""
    return os.geteuid() == 0 and any(os.access(base / "cgroup.procs", os.W_OK) for base, _ in _CGROUPS)


def _fill_memory() -> None:
    """Takes more memory than this process may have, which it then has no more of."""
    base, limit = next(found for found in _CGROUPS if os.access(found[0] / "cgroup.procs", os.W_OK))
    group = base / f"sparktorch-{os.getpid()}"
    group.mkdir()
    (group / limit).write_text(str(64 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    hoard = [bytearray(os.urandom(1 << 20)) for _ in range(512)]
    raise AssertionError(f"{len(hoard)} MiB, and still alive")


def _executor() -> int:
    """Returns the process id of the JVM that this Python worker belongs to."""
    pid = os.getppid()
    while "java" not in Path(f"/proc/{pid}/comm").read_text():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid
