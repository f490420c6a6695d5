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
from sparktorch.distributed.heartbeat import Pulses, beat_seconds, paced, silent_among, silent_seconds, suspects
from sparktorch.distributed.server import ControlServer
from sparktorch.errors import ClusterError, RankStalledError

__all__ = ["Monitor", "Observer", "Timeouts"]

_LOG = logging.getLogger(__name__)
_RANKS = logging.getLogger("sparktorch.ranks")
# The first warning of a rank that has not started, or makes no progress, comes after this time.
_WARN_SECONDS = 30.0
# `Monitor.look` reads the reports of rank 0 in each call, and the heartbeats of all ranks after pauses of this length.
_LOOK_SECONDS = 0.25
# A rank answers with its stack within the time of this many heartbeats.
_STACK_BEATS = 6
# A rank that has sent no heartbeat for the time of this many is silent: it does not answer any more.
_SILENT_BEATS = 10
# Ranks that wait for each other stop at nearly, not exactly, the same time. A rank that has stood still for at least
# this share of the longest time is blamed together with the rank that has stood still the longest.
_SHARE_OF_LONGEST = 0.8
# A message names at most this many ranks, and has at most this many stacks.
_MOST_NAMED = 8
# The ranks' lines that one look reads are shown up to this number.
_MOST_LINES = 1000
# Once one rank has failed, the others have this time to end by themselves, even if they are starting or computing.
_ENDING_SECONDS = 2.0
_LONGER_STALL = "if it may take so long, set stallTimeout higher"


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
        start: Seconds for which a job may wait for slots.
        stall: Seconds for which a rank may make no progress, and by which it may start later than the first rank.
        driver: Seconds without a heartbeat from the driver after which a rank ends its process.
    """

    start: float = 3600.0
    stall: float = 600.0
    driver: float = 30.0


class Monitor:
    """Watches the ranks through the store; the driver calls `look` repeatedly.

    Attributes:
        server: The driver's store; `None` if rank 0 hosts the store, and nothing can be watched.
        world_size: Number of ranks.
    """

    def __init__(
        self,
        server: ControlServer | None,
        world_size: int,
        observer: Observer,
        timeouts: Timeouts,
        *,
        log_level: int = logging.WARNING,
        is_starved: Callable[[], bool] = never,
        has_slots: bool = False,
    ) -> None:
        """Starts the timeouts.

        `is_starved` returns whether no task of the job runs, and no other job of this process holds slots. `has_slots`
        says that the ranks' processes run already, as those of a pool do.
        """
        self.server = server
        self.world_size = world_size
        self._observer = observer
        self._timeouts = timeouts
        self._log_level = log_level
        self._is_starved = is_starved
        self._has_slots = has_slots
        now = time.monotonic()
        # Since when the job has been starved of slots or, once it has slots, some of its ranks have been missing.
        self._waiting_since = now
        self._look_seconds = paced(_LOOK_SECONDS, world_size)
        self._next_look = now
        self._next_warning = now + _WARN_SECONDS
        # By rank: the seconds without progress after which the next warning comes.
        self._warn_again_after: dict[int, float] = {}
        self._pulses = Pulses[dict[str, Any]](_progress_in)
        self._failed_at: float | None = None

    def look(self) -> None:
        """Forwards new reports and checks the heartbeats.

        Raises a `ClusterError` if the ranks got no slots in time, and a `RankStalledError` if a rank makes no progress
        or has not started in time.
        """
        if self.server is None:
            return
        self._forward_progress(self.server)
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._look_seconds
        for rank, beat in enumerate(self._forward_logs(self.server)):
            if beat is not None:
                self._pulses.note(rank, beat, at=now)
        if len(self._pulses) < self.world_size:
            self._check_started(now)
        else:
            self._check_stalled(self.server, now)

    def give_time_to_end(self) -> None:
        """Tells the ranks that their root cause is known; raises it if they do not end within two seconds.

        The driver calls it while the job runs. Ranks that know end without raising, so that Spark logs no exceptions.
        """
        failure = self.server.acknowledge() if self.server is not None else None
        if failure is None:
            return
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
        if now - self._failed_at > _ENDING_SECONDS:
            raise failure

    def listen(self) -> None:
        """Forwards all that the ranks have reported by now, such as the last reports of a job that has ended."""
        if self.server is not None:
            self._forward_progress(self.server)
            self._forward_logs(self.server)

    @property
    def is_training(self) -> bool:
        """Whether rank 0 trains, or runs a user's function, as its last heartbeat says."""
        return 0 in self._pulses and self._pulses[0].record["phase"] in ("training", "running")

    def wait_for_dead(self, ranks: Iterable[int]) -> set[int]:
        """Waits until each of the ranks sends another heartbeat or counts as silent; returns the silent ones."""
        server = self.server
        assert server is not None

        def read() -> dict[int, dict[str, Any]]:
            return {rank: beat for rank, beat in enumerate(server.beats(self.world_size)) if beat is not None}

        return silent_among(ranks, read, self._pulses, silent_seconds(self.world_size))

    def _forward_progress(self, server: ControlServer) -> None:
        """Forwards epochs and progress, which rank 0 alone reports."""
        for record in server.new_epochs():
            self._observer.epoch(record)
        progress = server.progress()
        if progress is not None:
            self._observer.progress(progress)

    def _forward_logs(self, server: ControlServer) -> list[dict[str, Any] | None]:
        """Forwards the ranks' warnings and log lines; returns the heartbeats that told of them."""
        beats = server.beats(self.world_size)
        for warning in server.new_warnings(beats):
            _LOG.warning("rank %d on %s: %s", warning["rank"], warning["host"], warning["text"])
        _show([line for line in server.new_lines(beats) if line[1] >= self._log_level])
        return beats

    def _check_started(self, now: float) -> None:
        """Warns of ranks that have not started, and raises after the timeout."""
        # All ranks of a barrier job get their slots at once: where one has started, the others have slots.
        if self._pulses and not self._has_slots:
            self._has_slots = True
            self._waiting_since = now
        missing = [rank for rank in range(self.world_size) if rank not in self._pulses]
        if self._has_slots:
            self._check_missing(missing, now)
        else:
            self._check_slots(missing, now)

    def _check_missing(self, missing: list[int], now: float) -> None:
        """Warns of ranks that have slots and have not started, and raises after the timeout."""
        if now - self._waiting_since > self._timeouts.stall:
            raise RankStalledError(
                f"ranks {_listed(missing)} of {self.world_size} have not started within {self._timeouts.stall:g} s",
                hint="see the logs of their executors: does their Python start, and import torch, and do they "
                "reach the driver? If it takes them so long, set stallTimeout higher",
                rank=missing[0],
                code="ST-NOT-STARTED",
            )
        if now > self._next_warning:
            why = "their Python still starts, or does not reach the driver; the logs of their executors tell"
            self._warn_of_missing(missing, why, now)

    def _check_slots(self, missing: list[int], now: float) -> None:
        """Warns that the job is starved of slots, and raises after the timeout."""
        if not self._is_starved():
            self._waiting_since = now
        starved_for = now - self._waiting_since
        if starved_for > self._timeouts.start:
            raise ClusterError(
                f"the cluster has had no slots for the {self.world_size} ranks for {self._timeouts.start:g} s: "
                "other jobs hold them",
                hint="wait for those to end, set startTimeout higher, or numWorkers lower",
                param="startTimeout",
                code="ST-SLOTS",
            )
        if now > self._next_warning and starved_for > _WARN_SECONDS:
            self._warn_of_missing(missing, "are the slots of the cluster taken by other jobs?", now)

    def _warn_of_missing(self, missing: list[int], why: str, now: float) -> None:
        self._next_warning = now + _WARN_SECONDS
        _LOG.warning("ranks %s of %d have not started yet: %s", _listed(missing), self.world_size, why)

    def _check_stalled(self, server: ControlServer, now: float) -> None:
        """Warns of ranks that are silent or make no progress, and raises after the timeout."""
        pulses = {rank: pulse for rank, pulse in self._pulses.items() if not pulse.record["ended"]}
        # Silent ranks are blamed first: their last heartbeat is outdated, and ranks without progress may wait for them.
        silent_after = min(_SILENT_BEATS * beat_seconds(self.world_size), self._timeouts.stall / 2)
        beat_age = {rank: now - pulse.changed_at for rank, pulse in pulses.items()}
        silent_for = {rank: age for rank, age in beat_age.items() if age > silent_after}
        idle_for = {rank: now - pulses[rank].moved_at for rank in suspects(pulses)}
        are_silent = bool(silent_for)
        stalled_for = silent_for if are_silent else idle_for
        longest = max(stalled_for.values(), default=0.0)
        if longest > self._timeouts.stall:
            blamed = {rank: seconds for rank, seconds in stalled_for.items() if seconds > _SHARE_OF_LONGEST * longest}
            raise self._error_for_silent(server, blamed) if are_silent else self._error_for_idle(server, blamed)
        self._warn_of_stalled(stalled_for, are_silent=are_silent)

    def _warn_of_stalled(self, stalled_for: dict[int, float], *, are_silent: bool) -> None:
        """Warns of a rank after `_WARN_SECONDS`, and again each time that its seconds have doubled."""
        to_warn_of = []
        for rank, seconds in stalled_for.items():
            if seconds < _WARN_SECONDS:
                self._warn_again_after.pop(rank, None)
            elif seconds > self._warn_again_after.get(rank, _WARN_SECONDS):
                self._warn_again_after[rank] = 2 * seconds
                to_warn_of.append(rank)
        for rank in to_warn_of[:_MOST_NAMED]:
            state = _state_of(rank, self._pulses[rank].record, is_silent=are_silent)
            _LOG.warning("%s for %.0f s", state, stalled_for[rank])
        if len(to_warn_of) > _MOST_NAMED:
            _LOG.warning("... and %d other ranks", len(to_warn_of) - _MOST_NAMED)

    def _error_for_silent(self, server: ControlServer, silent_for: dict[int, float]) -> RankStalledError:
        """Returns the error for the rank that has been silent for the most seconds."""
        rank = max(silent_for, key=lambda rank: silent_for[rank])
        phase = self._pulses[rank].record["phase"]
        hint = "its process is stopped, native code in it holds Python's lock, or its host is cut off; " + _LONGER_STALL
        what = f"rank {rank} does not answer: {silent_for[rank]:.0f} s ago it was {phase}"
        return self._stalled_error(rank, what, hint, server.last_lines(rank))

    def _error_for_idle(self, server: ControlServer, idle_for: dict[int, float]) -> RankStalledError:
        """Returns the error for ranks that send heartbeats, and have made no progress for `idle_for[rank]` seconds.

        Several ranks in collectives wait for each other. Otherwise the rank that has stood still the longest is named.
        """
        ranks = sorted(idle_for)
        stacks = self._stacks(server, ranks[:_MOST_NAMED])
        rank = max(idle_for, key=lambda rank: idle_for[rank])
        record = self._pulses[rank].record
        phase = record["phase"]
        seconds = f"{idle_for[rank]:.0f} s"
        trace = server.last_lines(rank)
        if len(ranks) > 1 and record["collectives"] is not None:
            hosts = [self._pulses[waiting].record["host"] for waiting in ranks[:_MOST_NAMED]]
            names = " and ".join(dict.fromkeys(hosts))
            hint = f"is the network between {names} cut? If one step may take so long, set stallTimeout higher"
            for waiting in sorted(stacks):
                trace += f"Stack of rank {waiting}:\n{stacks[waiting]}\n"
            what = f"ranks {_listed(ranks)} have waited for each other for {seconds} while {phase}"
            return self._stalled_error(rank, what, hint, trace)
        if rank in stacks:
            trace += f"Stack of rank {rank}:\n{stacks[rank]}"
        what = f"rank {rank} stands still: it has been {phase} for {seconds}"
        return self._stalled_error(rank, what, _LONGER_STALL, trace)

    def _stalled_error(self, rank: int, what: str, hint: str, trace: str) -> RankStalledError:
        """Returns an error with the position of a rank."""
        record = self._pulses[rank].record
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


def _progress_in(beat: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the fields of a heartbeat that change when the rank makes progress."""
    return tuple(beat[name] for name in ("phase", "epoch", "step", "moves", "collectives", "waiting"))


def _state_of(rank: int, record: dict[str, Any], *, is_silent: bool) -> str:
    """Returns as text where a rank runs, and in which phase it has stayed."""
    state = f"has not been heard of, since it was {record['phase']}" if is_silent else f"has been {record['phase']}"
    position = f", epoch {record['epoch']}, step {record['step']}," if record["step"] is not None else ""
    return f"rank {rank} on {record['host']} (pid {record['pid']}) {state}{position}"


def _listed(ranks: list[int]) -> str:
    """Returns a list of ranks as text; of a long list, the first ranks and the number of the others."""
    others = len(ranks) - _MOST_NAMED
    if others <= 1:  # The number of one more rank is shorter than the words "and 1 others".
        return str(ranks)
    return f"{ranks[:_MOST_NAMED]} and {others} others"


def _show(lines: list[tuple[int, int, str]]) -> None:
    """Shows the lines of ranks, each with rank and level; a line of many ranks appears once, with their number."""
    ranks_with: dict[tuple[int, str], set[int]] = {}
    for rank, level, line in lines:
        ranks_with.setdefault((level, line), set()).add(rank)
    texts: list[tuple[int, str]] = []
    merged: set[tuple[int, str]] = set()
    for rank, level, line in lines:
        others = len(ranks_with[level, line]) - 1
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
