"""Monitors the ranks of a running job from the driver: forwards their reports, and ends a stalled job."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from tqdm.auto import tqdm

from sparktorch.distributed.heartbeat import Pulses, alive, waited_for
from sparktorch.distributed.server import ControlServer
from sparktorch.errors import ClusterError, RankStalledError

__all__ = ["Monitor", "Observer", "Timeouts"]

_LOG = logging.getLogger(__name__)
_RANKS = logging.getLogger("sparktorch.ranks")
_WARN_SECONDS = 30.0
_LOOK_SECONDS = 0.5  # between checks of heartbeats; each call of `look` reads everything else
_STACK_SECONDS = 3.0
_MUTE_SECONDS = 5.0  # ten heartbeats
_ENDING_SECONDS = 2.0  # of ranks that are still starting, or compute


class Observer(Protocol):
    """Receives the ranks' progress on the driver."""

    def progress(self, record: dict[str, Any]) -> None:
        """Receives rank 0's position: epoch, epochs, step, steps, loss."""
        ...

    def epoch(self, record: dict[str, Any]) -> None:
        """Receives the metrics of a finished epoch, each exactly once."""
        ...


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long the driver and the ranks wait for each other.

    Attributes:
        start: Seconds that a job may wait for slots.
        stall: Seconds that a rank may make no progress, or may start after the first one.
        driver: Seconds without a heartbeat from the driver after which a rank ends its process.
    """

    start: float = 3600.0
    stall: float = 600.0
    driver: float = 30.0


class Monitor:
    """Watches the ranks through the store; the driver calls `look` repeatedly."""

    def __init__(
        self,
        server: ControlServer | None,
        world_size: int,
        observer: Observer,
        patience: Timeouts,
        *,
        log_level: int = logging.WARNING,
        is_starved: Callable[[], bool] = lambda: False,
        running: bool = False,
    ) -> None:
        """Starts the timeouts.

        `is_starved` returns whether no task of the job runs, and no other job of this process holds slots; `running`
        says that the ranks' processes run already, as those of a pool do.
        """
        self.server = server
        self.world_size = world_size
        self._observer, self._patience = observer, patience
        self._log_level, self._is_starved = log_level, is_starved
        now = time.monotonic()
        self._next_look = self._slots_seen = now
        self._next_warning = now + _WARN_SECONDS
        self._warned: dict[int, float] = {}
        self._first_arrival = now if running else None
        self._pulses = Pulses[dict[str, Any]](_moves)
        self._failed_at: float | None = None

    def look(self) -> None:
        """Forwards new reports and checks the heartbeats.

        Raises a `ClusterError` if the ranks got no slots in time, and a `RankStalledError` if one makes no progress or
        has not started in time.
        """
        if self.server is None:
            return
        self.listen(self.server)
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            self._look_at_beats(self.server)

    def look_for_failure(self) -> None:
        """Lets all ranks end without raising once one has reported the root cause; raises it if they take too long."""
        failure = self.server.acknowledge() if self.server is not None else None
        if failure is None:
            return
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        if now - self._failed_at > _ENDING_SECONDS:
            raise failure

    def listen(self, server: ControlServer) -> None:
        """Forwards epochs, warnings, log lines and progress."""
        for record in server.new_epochs():
            self._observer.epoch(record)
        for warning in server.new_warnings(self.world_size):
            _LOG.warning("rank %d on %s: %s", warning["rank"], warning["host"], warning["text"])
        for rank, level, line in server.new_lines(self.world_size):
            if level >= self._log_level:
                _show(rank, level, line)
        progress = server.progress()
        if progress is not None:
            self._observer.progress(progress)

    def alive(self, ranks: Iterable[int], seconds: float) -> set[int]:
        """Returns the ranks that send a heartbeat or end within `seconds` from now."""
        assert self.server is not None
        return alive(set(ranks), seconds, self.server.beat, self.server.ended)

    def _look_at_beats(self, server: ControlServer) -> None:
        now = time.monotonic()
        beats = server.beats(self.world_size)
        for rank, beat in enumerate(beats):
            if beat is not None:
                self._pulses.note(rank, beat, at=now)
        if len(self._pulses) < self.world_size:
            self._look_for_missing(now)
        else:
            self._look_for_stalled(server, now)

    def _look_for_missing(self, now: float) -> None:
        """Warns of ranks that have not started, and raises after the timeout."""
        missing = [rank for rank in range(self.world_size) if rank not in self._pulses]
        if self._pulses or self._first_arrival is not None:
            self._first_arrival = self._first_arrival or now
            if now - self._first_arrival > self._patience.stall:
                raise RankStalledError(
                    f"ranks {missing} of {self.world_size} have not started within {self._patience.stall:g} s",
                    hint="see the logs of their executors: does their Python start, and import torch, and do they "
                    "reach the driver? If it takes them so long, set stallTimeout higher",
                    rank=missing[0],
                    code="ST-NOT-STARTED",
                )
        else:
            self._look_for_slots(now)
        if now > self._next_warning and (self._pulses or now - self._slots_seen > _WARN_SECONDS):
            self._next_warning = now + _WARN_SECONDS
            _LOG.warning(
                "ranks %s of %d have not started yet: are the slots of the cluster taken by other jobs?",
                missing,
                self.world_size,
            )

    def _look_for_slots(self, now: float) -> None:
        """Raises if the job has been starved of slots for too long."""
        if not self._is_starved():
            self._slots_seen = now
        elif now - self._slots_seen > self._patience.start:
            raise ClusterError(
                f"the cluster has had no slots for the {self.world_size} ranks for {self._patience.start:g} s: "
                "other jobs hold them",
                hint="wait for those to end, set startTimeout higher, or numWorkers lower",
                param="startTimeout",
                code="ST-SLOTS",
            )

    def _look_for_stalled(self, server: ControlServer, now: float) -> None:
        """Warns of ranks that make no progress, and raises after the timeout."""
        pulses = {rank: self._pulses[rank] for rank in self._pulses if not server.ended(rank)}
        # Blame silent ranks first: their last heartbeat is outdated, and ranks without progress may wait for them.
        patience = min(_MUTE_SECONDS, self._patience.stall / 2)
        idle = {rank: now - pulse.beat for rank, pulse in pulses.items() if now - pulse.beat > patience}
        mute = bool(idle)
        idle = idle or {rank: now - pulses[rank].moved for rank in waited_for(pulses)}
        longest = max(idle.values(), default=0.0)
        if longest > self._patience.stall:
            raise self._stalled(server, {rank: idle[rank] for rank in idle if idle[rank] > 0.8 * longest}, mute=mute)
        for rank, seconds in idle.items():
            if seconds < _WARN_SECONDS:
                self._warned.pop(rank, None)
            elif seconds > self._warned.get(rank, _WARN_SECONDS):
                self._warned[rank] = 2 * seconds
                _LOG.warning("%s for %.0f s", _place(rank, pulses[rank].record, mute=mute), seconds)

    def _stalled(self, server: ControlServer, idle: dict[int, float], *, mute: bool) -> RankStalledError:
        """Returns the error for ranks without progress or, if `mute`, without heartbeats for `idle[rank]` seconds."""
        stacks = {} if mute else self._stacks(server, list(idle))
        rank = max(idle, key=lambda rank: idle[rank])
        record = self._pulses[rank].record
        trace = server.last_lines(rank)
        hint = "if it may take so long, set stallTimeout higher"
        if mute:
            what = f"rank {rank} does not answer: {idle[rank]:.0f} s ago it was {record['phase']}"
            hint = "its process is stopped, native code in it holds Python's lock, or its host is cut off; " + hint
        elif len(idle) > 1 and record["collectives"] is not None:
            what = f"ranks {sorted(idle)} wait for each other for {idle[rank]:.0f} s, {record['phase']}"
            hosts = " and ".join(dict.fromkeys(self._pulses[one].record["host"] for one in sorted(idle)))
            hint = f"is the network between {hosts} cut? If one step may take so long, set stallTimeout higher"
            trace += "".join(f"Stack of rank {one}:\n{stacks[one]}\n" for one in sorted(stacks))
        else:
            what = f"rank {rank} stands still: it has been {record['phase']} for {idle[rank]:.0f} s"
            trace += f"Stack of rank {rank}:\n{stacks[rank]}" if rank in stacks else ""
        place = {name: record[name] for name in ("host", "pid", "epoch", "step")}
        return RankStalledError(what, hint=hint, trace=trace, rank=rank, **place)

    def _stacks(self, server: ControlServer, ranks: list[int]) -> dict[int, str]:
        """Returns the Python stacks of the ranks that answer in time."""
        server.ask_for_stacks()
        deadline = time.monotonic() + _STACK_SECONDS
        found: dict[int, str] = {}
        while len(found) < len(ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
            answers = {rank: server.stack(rank) for rank in ranks}
            found = {rank: stack for rank, stack in answers.items() if stack}
        return found


def _moves(beat: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the progress fields of a heartbeat."""
    return tuple(beat[name] for name in ("phase", "epoch", "step", "moves", "collectives", "waiting"))


def _place(rank: int, record: dict[str, Any], *, mute: bool) -> str:
    at = f", epoch {record['epoch']}, step {record['step']}," if record["step"] is not None else ""
    state = f"has not been heard of, since it was {record['phase']}" if mute else f"has been {record['phase']}"
    return f"rank {rank} on {record['host']} (pid {record['pid']}) {state}{at}"


def _show(rank: int, level: int, line: str) -> None:
    """Logs a rank's line in this process at any logger level; prints it if there are no handlers."""
    text = f"rank {rank}: {line}"
    if _RANKS.hasHandlers():
        _RANKS.handle(_RANKS.makeRecord(_RANKS.name, level, "", 0, text, (), None))
    else:
        tqdm.write(text, file=sys.stderr)
