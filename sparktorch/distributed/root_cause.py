"""Why a job failed: what a rank reported, who died without a word, or what Spark says."""

from __future__ import annotations

import re
from typing import Any

from sparktorch.distributed.monitor import Monitor
from sparktorch.distributed.os_memory import out_of_memory_kills
from sparktorch.distributed.server import ControlServer
from sparktorch.errors import ClusterError, RankError, RankLostError, SparkTorchError, failure_in

__all__ = ["UNREACHED_HINT", "ChainError", "RootCause"]

UNREACHED_HINT = (
    "open the ephemeral ports of its host to the executors, set spark.driver.host to an address they reach, or let a "
    "rank host it with rendezvous='rank0'"
)

_DEATH = (
    r"exited unexpectedly|ExecutorLostFailure|Executor heartbeat timed out|exit code|worker crashed|Connection reset"
    r"|FetchFailed"
)
_FIRST = r"barrier task \w+\(\d+, (\d+)\) finished unsuccessfully"  # stage, and partition: the rank
_MEMORY = r"OOMKilled|exceeding (?:physical |virtual )?memory limits"
_EXECUTOR = r"ExecutorLostFailure \(executor (\S+) (.*)\)(?: Reason: (.*))?"
_CHAIN = "SPARK-24820"  # which Spark names when it refuses a barrier job over partitions of other partitions
_GIB = 1 << 30
_ALIVE_SECONDS = 1.2  # more than two beats
_MORE_MEMORY = (
    "give the executors more memory outside of the JVM (spark.executor.memoryOverhead), or lower batchSize, or set "
    "microBatchSize"
)


class ChainError(ClusterError):
    """Spark runs no barrier job there: `coalesce`, `union` or the like, and no shuffle behind it."""


class RootCause:
    """Finds out why the job of one attempt failed."""

    def __init__(self, watch: Monitor) -> None:
        """Notes what has been killed before."""
        self._watch = watch
        self._kills = out_of_memory_kills()

    def of(self, error: Exception) -> SparkTorchError:
        """Returns what `fit` is to raise for an exception of Spark's.

        What ranks report because another one has gone is a consequence: the one that has gone is the cause.
        """
        message, server = str(error), self._watch.server
        failure, primary = server.first_failure() if server else (None, False)
        if failure is not None and primary:
            return failure
        if failure is None:
            told = failure_in(message)
            if told is not None:
                return told
        if "spark.driver.maxResultSize" in message:
            return ClusterError(
                "the trained model is larger than the driver accepts as the result of a job",
                hint="start the session with a larger spark.driver.maxResultSize",
            )
        if _CHAIN in message:
            return ChainError(
                "Spark runs no barrier job over partitions that are joined or put side by side without a shuffle, as "
                "by coalesce() and union()",
                hint=f"repartition({self._watch.world_size}) behind it",
            )
        # Where a session is stopped, pyspark may fail once more while it handles Spark's own error.
        if re.search("SparkContext (was shut down|is stopped)", f"{message} {error.__context__}"):
            return ClusterError("the Spark session was stopped during the fit", hint="fit again, in a new session")
        # A rank that died is known by what it left: peers that lost it, or a worker process that was gone.
        if server is not None and (failure is not None or re.search(_DEATH, message)):
            dead = self._dead(server, message, failure.where if failure is not None else {})
            if dead is not None:
                return dead
        if failure is not None:
            return RankLostError(
                f"the ranks have lost each other, and none has died: {failure.what}",
                hint="is the network between their hosts cut, or a port closed?",
                trace=failure.trace,
                **failure.where,
            )
        return _from_message(message)

    def _dead(self, server: ControlServer, message: str, peer: dict[str, Any]) -> SparkTorchError | None:
        """Returns an error for the rank that had arrived, reported nothing, and beats no more.

        As soon as one rank has ended, Spark ends the others, so that several may be quiet. Whichever Spark saw end
        first has died, or it has reported who fell silent before. Without either, it is whoever is silent now.
        """
        self._watch.listen(server)  # for its last lines
        quiet = server.quiet(self._watch.world_size)
        named = re.search(_FIRST, message)
        first = {int(named[1])} if named else set[int]()
        for suspects in (first & quiet.keys(), server.silent() & quiet.keys(), set(quiet)):
            dead = suspects - self._watch.alive(suspects, _ALIVE_SECONDS)
            if dead:
                break
        else:
            return None
        rank = min(dead, key=lambda one: float(quiet[one]["time"]))
        beat = quiet[rank]
        # The last beat may be half a second old. Where ranks train in step, it is at the step of the peer that lost it.
        if beat["collectives"] is not None and peer.get("epoch") is not None:
            beat |= {name: peer.get(name) for name in ("epoch", "step")}
        executor = re.search(_EXECUTOR, message) if not first or rank in first else None
        return self._lost(server, rank, beat, message, executor)

    def _lost(
        self, server: ControlServer, rank: int, beat: dict[str, Any], message: str, executor: re.Match[str] | None
    ) -> RankLostError:
        what = f"rank {rank} died while {beat['phase']}, without an error of its own"
        hint = "it was killed, or crashed in native code; see the executor's log on that host"
        short = self._out_of_memory(server, beat["host"])
        held = f"it held {beat['memory'] / _GIB:.1f} GiB at its last beat: {_MORE_MEMORY}"
        if re.search(_MEMORY, message) or (short and executor is None):
            what, hint = f"rank {rank} was killed for want of memory while {beat['phase']}", held
        elif executor is not None:
            what = f"rank {rank} died while {beat['phase']}: its executor {executor[1]} was lost"
            hint = f"Spark says: {executor[3] or executor[2]}"
            if short:
                hint += f"; meanwhile the out-of-memory killer was at work on its host, and {held}"
        place = {name: beat[name] for name in ("host", "pid", "epoch", "step")}
        return RankLostError(what, hint=hint, trace=server.last_lines(rank), rank=rank, **place)

    def _out_of_memory(self, server: ControlServer, host: str) -> bool:
        """Whether the out-of-memory killer has been at work on a host meanwhile, as this process or its ranks saw."""
        here = out_of_memory_kills() - self._kills if host == server.rendezvous.host else 0
        return here + server.out_of_memory_kills(host) > 0


def _from_message(message: str) -> SparkTorchError:
    """Returns the error of a job whose ranks could not report: the Python part of Spark's message."""
    raised = re.search(r"Traceback \(most recent call last\):\n(?:.*\n)*?(\w[\w.]*: .*)\n", message)
    if raised is None and re.search(_EXECUTOR + "|exited unexpectedly|FetchFailed", message):
        return RankLostError(
            "a worker or its executor was lost before it could say so",
            hint="it was killed, crashed, or its host is cut off; see the executors' logs, and Spark's message below",
            trace=message,
        )
    if raised is None:
        return ClusterError("the barrier job failed", trace=message)
    if "DistNetworkError" in raised[1]:
        return ClusterError(
            f"a rank did not reach the store at which the ranks meet: {raised[1].partition(': ')[2]}",
            hint=UNREACHED_HINT,
        )
    missing = re.match(r"(?:ModuleNotFoundError|ImportError): (.*)", raised[1])
    if missing is None:
        return RankError(f"a rank could not start: {raised[1]}", trace=raised[0])
    return ClusterError(
        f"the Python of the executors cannot start a rank: {missing[1]}",
        hint="they need torch, numpy and pyarrow installed (PYSPARK_PYTHON names their Python), and your own "
        "modules and sparktorch shipped with --py-files or spark.addArtifacts",
    )
