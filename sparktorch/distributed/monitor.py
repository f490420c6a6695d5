"""Monitors the ranks of a running job from the driver: forwards their reports, and ends a stalled job."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from tqdm.auto import tqdm

from sparktorch.base.no_op import never
from sparktorch.distributed.heartbeat import Pulses, beat_seconds, paced, silent_among, silent_seconds, waited_for
from sparktorch.distributed.server import ControlServer
from sparktorch.errors import ClusterError, RankStalledError

__all__ = ["Monitor", "Observer", "Timeouts"]

_LOG = logging.getLogger(__name__)
_RANKS = logging.getLogger("sparktorch.ranks")
_WARN_SECONDS = 30.0
# Each call of `look` reads what rank 0 reports; what all ranks report, it reads after pauses of so many seconds.
_LOOK_SECONDS = 0.25
# In the time of so many beats, a rank answers with its stack; without any for so long, it does not answer at all.
_STACK_BEATS = 6
_MUTE_BEATS = 10
# A message names so many ranks, or has their stacks.
_MOST_NAMED = 8
# One look shows so many lines.
_MOST_LINES = 1000
# Once one has failed, ranks that are still starting, or compute, get so long to end.
_ENDING_SECONDS = 2.0


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
        is_starved: Callable[[], bool] = never,
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
        self._look_seconds = paced(_LOOK_SECONDS, world_size)
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
        self._look_at_main(self.server)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + self._look_seconds
            for rank, beat in enumerate(self._listen(self.server)):
                if beat is not None:
                    self._pulses.note(rank, beat, at=now)
            if len(self._pulses) < self.world_size:
                self._look_for_missing(now)
            else:
                self._look_for_stalled(self.server, now)

    def look_for_failure(self) -> None:
        """Lets all ranks end without raising once one has reported the root cause; raises it if they take too long."""
        failure = self.server.acknowledge() if self.server is not None else None
        if failure is None:
            return
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        if now - self._failed_at > _ENDING_SECONDS:
            raise failure

    def listen(self) -> None:
        """Forwards all that ranks have reported by now: those of a job that has ended report no more."""
        if self.server is not None:
            self._look_at_main(self.server)
            self._listen(self.server)

    @property
    def trains(self) -> bool:
        """Whether rank 0 trains, or runs a user's function, as its last heartbeat says."""
        return 0 in self._pulses and self._pulses[0].record["phase"] in ("training", "running")

    def dead(self, ranks: Iterable[int]) -> set[int]:
        """Returns the ranks whose heartbeats stay away; waits for the next one of the others."""
        server = self.server
        assert server is not None

        def read() -> dict[int, dict[str, Any]]:
            return {rank: beat for rank, beat in enumerate(server.beats(self.world_size)) if beat is not None}

        return silent_among(ranks, read, self._pulses, silent_seconds(self.world_size))

    def _look_at_main(self, server: ControlServer) -> None:
        """Forwards epochs and progress, which rank 0 alone reports."""
        for record in server.new_epochs():
            self._observer.epoch(record)
        progress = server.progress()
        if progress is not None:
            self._observer.progress(progress)

    def _listen(self, server: ControlServer) -> list[dict[str, Any] | None]:
        """Forwards the ranks' warnings and log lines; returns their heartbeats."""
        beats = server.beats(self.world_size)
        for warning in server.new_warnings(beats):
            _LOG.warning("rank %d on %s: %s", warning["rank"], warning["host"], warning["text"])
        _show([line for line in server.new_lines(beats) if line[1] >= self._log_level])
        return beats

    def _look_for_missing(self, now: float) -> None:
        """Warns of ranks that have not started, and raises after the timeout."""
        missing = [rank for rank in range(self.world_size) if rank not in self._pulses]
        if self._pulses or self._first_arrival is not None:
            self._first_arrival = self._first_arrival or now
            if now - self._first_arrival > self._patience.stall:
                raise RankStalledError(
                    f"ranks {_named(missing)} of {self.world_size} have not started within {self._patience.stall:g} s",
                    hint="see the logs of their executors: does their Python start, and import torch, and do they "
                    "reach the driver? If it takes them so long, set stallTimeout higher",
                    rank=missing[0],
                    code="ST-NOT-STARTED",
                )
        else:
            self._look_for_slots(now)
        if now > self._next_warning and (self._pulses or now - self._slots_seen > _WARN_SECONDS):
            self._next_warning = now + _WARN_SECONDS
            why = "are the slots of the cluster taken by other jobs?"
            if self._first_arrival is not None:  # All ranks of a barrier job get their slots at once.
                why = "their Python still starts, or does not reach the driver; the logs of their executors tell"
            _LOG.warning("ranks %s of %d have not started yet: %s", _named(missing), self.world_size, why)

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
        pulses = {rank: pulse for rank, pulse in self._pulses.items() if not pulse.record["ended"]}
        # Silent ranks are blamed first: their last heartbeat is outdated, and ranks without progress may wait for them.
        patience = min(_MUTE_BEATS * beat_seconds(self.world_size), self._patience.stall / 2)
        idle = {rank: now - pulse.beat for rank, pulse in pulses.items() if now - pulse.beat > patience}
        mute = bool(idle)
        idle = idle or {rank: now - pulses[rank].moved for rank in waited_for(pulses)}
        longest = max(idle.values(), default=0.0)
        if longest > self._patience.stall:
            raise self._stalled(server, {rank: idle[rank] for rank in idle if idle[rank] > 0.8 * longest}, mute=mute)
        # A rank gets a warning after some seconds without progress, and further ones each time when these have doubled.
        to_warn_of = []
        for rank, seconds in idle.items():
            if seconds < _WARN_SECONDS:
                self._warned.pop(rank, None)
            elif seconds > self._warned.get(rank, _WARN_SECONDS):
                self._warned[rank] = 2 * seconds
                to_warn_of.append(rank)
        for rank in to_warn_of[:_MOST_NAMED]:
            _LOG.warning("%s for %.0f s", _state_of(rank, pulses[rank].record, mute=mute), idle[rank])
        if len(to_warn_of) > _MOST_NAMED:
            _LOG.warning("... and %d other ranks", len(to_warn_of) - _MOST_NAMED)

    def _stalled(self, server: ControlServer, idle: dict[int, float], *, mute: bool) -> RankStalledError:
        """Returns the error for ranks without progress or, if `mute`, without heartbeats for `idle[rank]` seconds."""
        stacks = {} if mute else self._stacks(server, sorted(idle)[:_MOST_NAMED])
        rank = max(idle, key=lambda rank: idle[rank])
        record = self._pulses[rank].record
        trace = server.last_lines(rank)
        hint = "if it may take so long, set stallTimeout higher"
        if mute:
            what = f"rank {rank} does not answer: {idle[rank]:.0f} s ago it was {record['phase']}"
            hint = "its process is stopped, native code in it holds Python's lock, or its host is cut off; " + hint
        elif len(idle) > 1 and record["collectives"] is not None:
            what = f"ranks {_named(sorted(idle))} wait for each other for {idle[rank]:.0f} s, {record['phase']}"
            hosts = [self._pulses[waiting].record["host"] for waiting in sorted(idle)[:_MOST_NAMED]]
            names = " and ".join(dict.fromkeys(hosts))
            hint = f"is the network between {names} cut? If one step may take so long, set stallTimeout higher"
            trace += "".join(f"Stack of rank {waiting}:\n{stacks[waiting]}\n" for waiting in sorted(stacks))
        else:
            what = f"rank {rank} stands still: it has been {record['phase']} for {idle[rank]:.0f} s"
            trace += f"Stack of rank {rank}:\n{stacks[rank]}" if rank in stacks else ""
        position = {name: record[name] for name in ("host", "pid", "epoch", "step")}
        return RankStalledError(what, hint=hint, trace=trace, rank=rank, **position)

    def _stacks(self, server: ControlServer, ranks: list[int]) -> dict[int, str]:
        """Returns the Python stacks of the ranks that answer in time."""
        server.ask_for_stacks(ranks)
        deadline = time.monotonic() + _STACK_BEATS * beat_seconds(self.world_size)
        stacks: dict[int, str] = {}
        while len(stacks) < len(ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
            answers = {rank: server.stack(rank) for rank in ranks}
            stacks = {rank: stack for rank, stack in answers.items() if stack}
        return stacks


def _moves(beat: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the progress fields of a heartbeat."""
    return tuple(beat[name] for name in ("phase", "epoch", "step", "moves", "collectives", "waiting"))


def _state_of(rank: int, record: dict[str, Any], *, mute: bool) -> str:
    """Returns as text where a rank runs, and in which phase it has stayed."""
    position = f", epoch {record['epoch']}, step {record['step']}," if record["step"] is not None else ""
    state = f"has not been heard of, since it was {record['phase']}" if mute else f"has been {record['phase']}"
    return f"rank {rank} on {record['host']} (pid {record['pid']}) {state}{position}"


def _named(ranks: list[int]) -> str:
    """Returns a list of ranks as text; of many, the first ones and how many others there are."""
    others = len(ranks) - _MOST_NAMED
    return str(ranks) if others <= 1 else f"{ranks[:_MOST_NAMED]} and {others} others"


def _show(lines: list[tuple[int, int, str]]) -> None:
    """Shows the lines of ranks, each with rank and level; a line of many ranks appears once, with their number."""
    ranks: dict[tuple[int, str], set[int]] = {}
    for rank, level, line in lines:
        ranks.setdefault((level, line), set()).add(rank)
    texts: list[tuple[int, str]] = []
    merged: set[tuple[int, str]] = set()
    for rank, level, line in lines:
        others = len(ranks[level, line]) - 1
        if others < _MOST_NAMED:
            texts.append((level, f"rank {rank}: {line}"))
        elif (level, line) not in merged:
            merged.add((level, line))
            texts.append((level, f"rank {rank}: {line} ... and {others} other ranks"))
    for level, text in texts[:_MOST_LINES]:
        _log(level, text)
    if len(texts) > _MOST_LINES:
        _log(logging.WARNING, f"... and {len(texts) - _MOST_LINES} more lines of the ranks")


def _log(level: int, text: str) -> None:
    """Logs a text in this process at any logger level; prints it if there are no handlers."""
    if _RANKS.hasHandlers():
        _RANKS.handle(_RANKS.makeRecord(_RANKS.name, level, "", 0, text, (), None))
    else:
        tqdm.write(text, file=sys.stderr)
