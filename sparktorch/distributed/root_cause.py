"""Finds the root cause of a failed job: a rank's report, a rank that died silently, or Spark's message."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

from sparktorch.base.host_memory import out_of_memory_kills
from sparktorch.distributed.monitor import Monitor
from sparktorch.distributed.server import ControlServer
from sparktorch.distributed.store import UNREACHED_HINT
from sparktorch.errors import (
    JVM_MEMORY_HINT,
    SHIP_HINT,
    ClusterError,
    RankError,
    RankLostError,
    SparkTorchError,
    failure_in,
)

__all__ = ["ChainError", "RootCause", "naming_missing_modules"]

# Spark's message matches this pattern where a rank's process or executor may have died.
_DEATH = (
    r"exited unexpectedly|ExecutorLostFailure|Executor heartbeat timed out|exit code|worker crashed|Connection reset"
    r"|FetchFailed"
)
# It matches this one where Spark has seen that the process of a task is gone.
_GONE = r"exited unexpectedly|ExecutorLostFailure"
# Here, Spark names the stage and the partition of the task that ended first; the partition's number is the rank.
_FIRST = r"barrier task \w+\(\d+, (\d+)\) finished unsuccessfully"
# A cluster manager has ended a container for its memory.
_MEMORY = r"OOMKilled|exceeding (?:physical |virtual )?memory limits"
# The group is the last line of a Python traceback: the exception's type and text.
_RAISED = r"Traceback \(most recent call last\):\n(?:.*\n)*?(\w[\w.]*: .*)(?:\n|$)"
# The groups are the lost executor's id, what Spark saw of its end, and Spark's reason.
_EXECUTOR = r"ExecutorLostFailure \(executor (\S+) (.*)\)(?: Reason: (.*))?"
# Spark's message has this code when it refuses a barrier job after coalesce(), union() or the like.
_CHAIN = "SPARK-24820"
# The group says who cancelled the job, and may be empty.
_CANCELLED = r"Job \d+ cancelled *(.*?)(?: SQLSTATE: \w+)?(?:\n|$)"
_GIB = 1 << 30
_MORE_MEMORY = (
    "give the executors more memory outside of the JVM (spark.executor.memoryOverhead), or lower batchSize, or set "
    "microBatchSize"
)

# Where no rank could report, Spark's message says what has happened. Each row has a pattern for the message, and the
# class, text and hint of the error.
_REPORTED_BY_SPARK: tuple[tuple[str, type[SparkTorchError], str, str], ...] = (
    (
        _EXECUTOR + "|exited unexpectedly|FetchFailed",
        RankLostError,
        "a worker or its executor was lost before it could say so",
        "it was killed, crashed, or its host is cut off; see the executors' logs, and Spark's message below",
    ),
    (
        "TaskResultLost",
        ClusterError,
        "Spark has lost what a rank returned",
        f"if a JVM had no memory left: {JVM_MEMORY_HINT}",
    ),
    ("OutOfMemoryError: Java heap space", ClusterError, "Spark's JVM has no memory left", JVM_MEMORY_HINT),
    (
        "Connection refused|Answer from Java side is empty",  # These are errors of py4j.
        ClusterError,
        "the driver's JVM has ended during the job",
        f"its log says why. If it had no memory left: {JVM_MEMORY_HINT}",
    ),
)


class ChainError(ClusterError):
    """Spark refuses the barrier job: `coalesce`, `union` or the like without a shuffle after it."""


class RootCause:
    """Finds the root cause of an attempt's failed job."""

    def __init__(self, monitor: Monitor) -> None:
        """Takes the attempt's monitor; out-of-memory kills on this host are counted from now on."""
        self._monitor = monitor
        self._kills = out_of_memory_kills()

    def explain_ended(self, error: Exception | None) -> SparkTorchError | None:
        """Returns the error that `fit` raises for a job that has ended, or `None` if the job has no failure.

        `error` is the job's exception, `None` if it ended without one. Then a rank may have failed all the same: ranks
        end without raising once the driver knows the root cause.
        """
        server = self._monitor.server
        if error is None and (server is None or server.first_failure()[0] is None):
            return None
        return _name_file(self.explain(error or RuntimeError("the ranks have ended without results")))

    def explain(self, error: Exception) -> SparkTorchError:
        """Returns the error that `fit` raises for an exception of Spark.

        Errors that ranks report because a peer is lost are consequences: the lost peer is the root cause.
        """
        message = str(error)
        server = self._monitor.server
        failure, is_primary = server.first_failure() if server else (None, False)
        if failure is not None and is_primary:
            return failure
        if failure is None:
            failure_of_rank = failure_in(message)
            if failure_of_rank is not None:
                return failure_of_rank
        if "spark.driver.maxResultSize" in message:
            return ClusterError(
                "what the ranks return, such as a model, is larger than the driver accepts as the result of a job",
                hint="start the session with a larger spark.driver.maxResultSize",
                code="ST-DRIVER-MEMORY",
            )
        if _CHAIN in message:
            return ChainError(
                "Spark runs no barrier job over partitions that are joined or put side by side without a shuffle, as "
                "by coalesce() and union()",
                hint=f"repartition({self._monitor.world_size}) behind it",
            )
        cancellation = _cancellation_in(message, error)
        if cancellation is not None:
            return cancellation
        # A rank has died if peers lost it, or if Spark found its worker process gone.
        if server is not None and (failure is not None or re.search(_DEATH, message)):
            death = self._death(server, message, failure.where if failure is not None else {})
            if death is not None:
                return death
        if failure is not None:
            return RankLostError(
                f"the ranks have lost each other, and none has died: {failure.what}",
                hint="is the network between their hosts cut, or a port closed?",
                trace=failure.trace,
                **failure.where,
            )
        return _from_message(message)

    def _death(self, server: ControlServer, message: str, peer: dict[str, Any]) -> SparkTorchError | None:
        """Returns the error for a dead rank; `None` if no rank has died.

        A rank is dead if it had started, reported no failure, and sends no heartbeats. Spark kills all tasks once one
        ends, so several ranks look dead. The task that Spark saw end first is to blame. If its rank reported a lost
        peer, the peer whose heartbeat stopped is to blame, and otherwise a rank that is silent now. `peer` has the
        position of a rank that reported a lost peer, and is empty if there is none.
        """
        self._monitor.listen()  # The last lines of the dead rank may not be read yet.
        last_beats = server.beats_without_failure(self._monitor.world_size)
        named = re.search(_FIRST, message)
        first = {int(named[1])} if named else set[int]()
        dead = self._dead_among(server, last_beats.keys(), first, is_gone=re.search(_GONE, message) is not None)
        if not dead:
            return None
        rank = min(dead, key=lambda rank: float(last_beats[rank]["time"]))
        beat = last_beats[rank]
        # The last heartbeat may be half a second old. With collectives, the dead rank was at the step of its peer.
        if beat["collectives"] is not None and peer.get("epoch") is not None:
            beat |= {name: peer.get(name) for name in ("epoch", "step")}
        executor = re.search(_EXECUTOR, message) if not first or rank in first else None
        return self._lost(server, rank, beat, message, executor)

    def _dead_among(self, server: ControlServer, ranks: Set[int], first: set[int], *, is_gone: bool) -> set[int]:
        """Returns the ranks to blame among `ranks`: those that ended `first`, or lost peers, or any silent ranks."""
        if is_gone and first & ranks:
            return first & ranks  # No heartbeat needs to be waited for: Spark has seen that the process is gone.
        for suspects in (first & ranks, server.silent_peers() & ranks, set(ranks)):
            dead = self._monitor.wait_for_dead(suspects)
            if dead:
                return dead
        return set()

    def _lost(
        self, server: ControlServer, rank: int, beat: dict[str, Any], message: str, executor: re.Match[str] | None
    ) -> RankLostError:
        """Returns the error for a dead rank, from its last heartbeat and from what Spark says about its executor."""
        what = f"rank {rank} died while {beat['phase']}, without an error of its own"
        hint = (
            "it was killed from outside, or crashed in native code (as Gloo does where ranks call different "
            "collectives): see the log of its executor, on that host"
        )
        host_was_full = self._out_of_memory(server, beat["host"])
        memory_hint = f"it held {beat['memory'] / _GIB:.1f} GiB at its last beat: {_MORE_MEMORY}"
        if re.search(_MEMORY, message) or (host_was_full and executor is None):
            what = f"rank {rank} was killed for want of memory while {beat['phase']}"
            hint = memory_hint
        elif executor is not None:
            what = f"rank {rank} died while {beat['phase']}: its executor {executor[1]} was lost"
            hint = f"Spark says: {executor[3] or executor[2]}"
            if host_was_full:
                hint += f"; meanwhile the out-of-memory killer was at work on its host, and {memory_hint}"
        position = {name: beat[name] for name in ("host", "pid", "epoch", "step")}
        return RankLostError(what, hint=hint, trace=server.last_lines(rank), rank=rank, **position)

    def _out_of_memory(self, server: ControlServer, host: str) -> bool:
        """Returns whether the out-of-memory killer ran on a host, as seen by this process or reported by its ranks."""
        kills = server.out_of_memory_kills(host)
        if host == server.rendezvous.host:
            kills += out_of_memory_kills() - self._kills
        return kills > 0


def _name_file(error: SparkTorchError) -> SparkTorchError:
    """Returns the error; where ranks lack a module, the hint also names the file from which this process has it."""
    missing = re.search(r"No module named '(\w+)", error.what)
    file = getattr(sys.modules.get(missing[1]), "__file__", None) if missing else None
    if file is None:
        return error
    return SparkTorchError.from_dict({**error.to_dict(), "hint": f"{error.hint}; this process has it from {file}"})


def _cancellation_in(message: str, error: Exception) -> ClusterError | None:
    """Returns the error for a job that was ended with its session, or that somebody cancelled; `None` for others."""
    # When the session is stopped, pyspark may raise another error while it handles Spark's: both are searched.
    if re.search("SparkContext (was shut down|is stopped)", f"{message} {error.__context__}"):
        return ClusterError(
            "the Spark session was stopped during the fit", hint="fit again, in a new session", code="ST-CANCELLED"
        )
    cancelled = re.search(_CANCELLED, message)
    if cancelled is None:
        return None
    return ClusterError(
        f"the fit's Spark job was cancelled{f': {cancelled[1]}' if cancelled[1] else ''}",
        hint="by cancelAllJobs, by a cancellation of its job group or tag, or in Spark's UI; fit again",
        code="ST-CANCELLED",
    )


@contextmanager
def naming_missing_modules() -> Iterator[None]:
    """Context of a Spark job, in which the error of an executor that lacks a module says how to ship it."""
    try:
        yield
    except Exception as error:
        missing = _missing_module(str(error))
        if missing is None:
            raise
        raise missing from error


def _missing_module(message: str) -> ClusterError | None:
    """Returns the error for executors whose Python lacks a module, as Spark's message shows; `None` for others."""
    raised = re.search(_RAISED, message)
    missing = re.match(r"(?:ModuleNotFoundError|ImportError): (.*)", raised[1]) if raised else None
    if missing is None:
        return None
    return ClusterError(
        f"the Python of the executors cannot start a rank: {missing[1]}", hint=SHIP_HINT, code="ST-PACKAGES"
    )


def _from_message(message: str) -> SparkTorchError:
    """Returns the error for ranks that could not report, from Spark's message and the Python traceback in it."""
    broken = re.search(r"StreamBrokenError: (.*)", message)
    if broken is not None:
        what = f"the rows that Spark sends to a rank broke off: {broken[1]}"
        return ClusterError(what, hint="the log of its executor says why", trace=message)
    raised = re.search(_RAISED, message)
    if raised is None:
        for pattern, error_class, what, hint in _REPORTED_BY_SPARK:
            if re.search(pattern, message):
                return error_class(what, hint=hint, trace=message)
        return ClusterError("the barrier job failed", trace=message)
    if "DistNetworkError" in raised[1]:
        what = f"a rank did not reach the store at which the ranks meet: {raised[1].partition(': ')[2]}"
        return ClusterError(what, hint=UNREACHED_HINT)
    return _missing_module(message) or RankError(f"a rank could not start: {raised[1]}", trace=raised[0])
