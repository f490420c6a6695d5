"""What goes wrong in one rank, said in a line: `Fault("kill", marks, rank=1, step=5)`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pyspark import BarrierTaskContext

from sparktorch import Callback
from sparktorch.train.callbacks import FitContext

Deed = Literal["kill", "stop", "hang", "raise", "exit", "slow", "kill executor", "fill memory", "say"]
Phase = Literal["starting", "rendezvous", "training", "validating", "saving", "finishing"]


class Fault(Callback):
    """Does something to one rank, once, in a phase of its life; every rank leaves its process id in `marks`.

    "starting" is where the rank unpickles its work, "rendezvous" where it opens the process group, and "finishing"
    where its weights are taken, once the last checkpoint is written. Training and saving, it waits for a step.
    """

    ranks = "all"
    words = "about to fail"

    def __init__(
        self,
        deed: Deed,
        marks: Path,
        *,
        rank: int = 1,
        at: Phase = "training",
        step: int = 0,
        seconds: float = 0.05,
        group: Path | None = None,
    ) -> None:
        self._deed, self._marks, self._rank, self._at, self._step = deed, marks, rank, at, step
        self._seconds, self._group = seconds, group
        self._saves = False
        marks.mkdir(parents=True, exist_ok=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        context = BarrierTaskContext.get()
        if not isinstance(context, BarrierTaskContext):  # on the driver
            return
        with (self._marks / "pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        if context.partitionId() == self._rank:
            if self._at == "starting":
                self._do()
            if self._at == "rendezvous":
                self._lie_in_wait(context.taskAttemptId())

    def on_fit_start(self, context: FitContext) -> None:
        if self._at == "validating" and context.world.rank == self._rank:
            context.module.register_forward_pre_hook(self._evaluates)

    def on_step_end(self, context: FitContext) -> None:
        self._saves = context.world.rank == self._rank and context.step >= self._step
        if self._at == "training" and context.world.rank == self._rank:
            if self._deed == "slow":
                time.sleep(self._seconds)
            elif context.step == self._step:
                self._do()

    def state_dict(self) -> dict[str, Any]:
        if self._at == "saving" and self._saves:
            self._do()
        return {}

    def on_fit_end(self, context: FitContext) -> None:
        if self._at == "finishing" and context.world.rank == self._rank:
            context.module.register_state_dict_pre_hook(lambda *_: self._do())

    def _evaluates(self, module: torch.nn.Module, _: Any) -> None:
        if not module.training:
            self._do()

    def _lie_in_wait(self, task: int) -> None:
        """Waits for this task to open the process group: a later one in the same process is none of it."""
        honest = dist.init_process_group

        @wraps(honest)
        def faulty(*arguments: Any, **named: Any) -> Any:
            dist.init_process_group = honest
            context = BarrierTaskContext.get()
            if context is not None and context.taskAttemptId() == task:
                self._do()
            return dist.init_process_group(*arguments, **named)

        dist.init_process_group = faulty

    def _do(self) -> None:
        done = self._marks / "done"
        if done.exists():
            return
        done.write_text(repr(time.time()))
        print(self.words, flush=True)
        if self._deed == "kill executor":
            os.kill(executor(), signal.SIGKILL)
        if self._deed in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self._deed == "kill" else signal.SIGSTOP)
        if self._deed == "say":
            logging.getLogger("mine").warning("careful, %d", self._rank)
        if self._deed == "fill memory":
            self._fill_memory()
        if self._deed == "hang":
            (self._marks / "hung").write_text(str(os.getpid()))
            time.sleep(1000)
        if self._deed == "exit":
            os._exit(3)
        if self._deed == "raise":
            raise ArithmeticError("planted")

    def _fill_memory(self) -> None:
        """Takes more memory than this process may have, which it then has no more of."""
        assert self._group is not None
        (self._group / "cgroup.procs").write_text(str(os.getpid()))
        hoard = [bytearray(os.urandom(1 << 20)) for _ in range(512)]
        raise AssertionError(f"{len(hoard)} MiB, and still alive")


def pids(marks: Path) -> set[int]:
    """Returns the process ids of all ranks that have begun."""
    return {int(line) for line in (marks / "pids").read_text().split()}


def gone(processes: set[int]) -> bool:
    """Whether all of the processes have ended."""
    return not any(_runs(pid) for pid in processes)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def executor() -> int:
    """Returns the process id of the JVM that this Python worker belongs to."""
    pid = os.getppid()
    while "java" not in Path(f"/proc/{pid}/comm").read_text():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid
