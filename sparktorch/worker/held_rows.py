"""The rows of one rank, ready for training: read once, trained any number of times."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
import torch

from sparktorch.base.config import CheckpointConfig, StorageConfig, TrainConfig
from sparktorch.base.devices import is_host, select
from sparktorch.base.host_memory import forget_peaks, peaks
from sparktorch.base.imports import uncollected
from sparktorch.base.state_dict import packed_weights
from sparktorch.base.world import World
from sparktorch.data.columns import Groups
from sparktorch.data.dataset.base import Shard
from sparktorch.data.dataset.reader import read_shard
from sparktorch.data.dataset.shards import InMemoryShard
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.data.storage import RowStorage, local_directory
from sparktorch.distributed.client import Client
from sparktorch.distributed.process_group import process_group
from sparktorch.errors import counted
from sparktorch.train.checkpoint.checkpointer import Checkpointer, unfinished
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.train.loop.loop import train
from sparktorch.train.loop.validation import improvements
from sparktorch.train.strategies.registry import strategy_for, strategy_type
from sparktorch.worker.job import RankJob, RankResult, TrainJob
from sparktorch.worker.placement import place

__all__ = ["HeldRows", "Run", "find_checkpoint"]

_SPLIT, _PLACE, _KEYS = "rows", "split by their position", "split by their keys"  # what checkpoints say of them


class Clock:
    """Measures laps, in seconds by name, from its creation on.

    Attributes:
        laps: The seconds of the laps so far, those `before` included.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.laps = dict(before or {})
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Ends a lap, from the end of the one before."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a rank knows while the ranks work on their rows together, besides the rows.

    Attributes:
        shard: The rank's rows, with their positions in the order of all rows.
        team: The rank's place among those that train one model; an independent rank is alone.
        config: How this rank trains.
        plan: Which row is trained when.
        validation_rows: The most validation rows of any rank of the team.
        fingerprint: Identifies the training rows of all ranks.
        checkpointer: What saves the training, `None` without checkpoints.
        clock: Measures the phases; the last one ends with the context.
    """

    shard: Shard
    team: World
    config: TrainConfig
    plan: SamplingPlan
    validation_rows: int
    fingerprint: str
    checkpointer: Checkpointer | None
    clock: Clock

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, those of saving included."""
        return self.clock.laps | (self.checkpointer.seconds if self.checkpointer else {})


class HeldRows:
    """The rows of one rank, read and checked, and known to the other ranks.

    Attributes:
        world: This rank's place.
        shard: Its rows.
        imbalanced: Whether they are to be split by position: the ranks have too different numbers of rows, or those of
            the training that goes on were split so.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], world: World, job: RankJob, client: Client) -> None:
        """Reads the rows, whose columns `job.columns` names, and waits until the other ranks have read theirs."""
        clock = Clock()
        # The first optimizer of a process imports torch._dynamo, which takes most of a second: do it while rows arrive.
        threading.Thread(target=_import_dynamo, daemon=True).start()
        client.enter("loading")
        self.shard = shard = _read(batches, world, job, client)
        with ExitStack() as undo:
            undo.callback(self.close)
            clock.lap("load")
            client.enter("waiting for the other ranks")
            kept = _by_place(job.checkpoint, client) if world.is_main else None
            self._peers = _meet(shard, world, client, kept)
            clock.lap("wait")
            self._of_reading = clock.laps
            self.world = world = _on_one_kind(world, self._peers, client)
            counts = [peer["rows"] for peer in self._peers]
            if job.columns.groups is not None and world.is_main:
                _tell_of_groups(job.columns.groups, self._peers, client)
            self._max_imbalance = job.max_imbalance
            self._by_place, kept = job.by_place, self._peers[0]["by_place"]
            uneven = job.max_imbalance is not None and _imbalanced(counts, job.max_imbalance)
            self.imbalanced = uneven if kept is None else kept != job.by_place
            if not self.imbalanced:
                select(world.device)
                if not is_host(world.device):
                    forget_peaks(world.device)
                shard.to(world.device)
            undo.pop_all()

    def fit(self, job: TrainJob, client: Client, *, without: int | None = None) -> RankResult:
        """Trains on the rows; takes and raises what `together` does."""
        with self.together(job, client, without=without) as run:
            config, plan = run.config, run.plan
            if self.world.is_main and plan.rows < config.batch_size:
                found = counted(plan.rows, "row", "rows")
                if job.columns.groups is not None:
                    found = counted(plan.rows, "sample", "samples")
                client.warn(f"there are {found}, fewer than batchSize: each epoch is one step")
            outcome = train(
                self.shard,
                job.recipe,
                config,
                run.team,
                client,
                steps=plan.steps,
                validation_rows=run.validation_rows,
                classes=job.columns.classes,
                checkpointer=run.checkpointer,
            )
        if outcome is None:
            client.pause.paused = True
            return RankResult({"paused": True})
        more = {"threads": self.world.threads, "seconds": run.seconds, **peaks(self.world.device)}
        meta: dict[str, Any] = {**self._of_rows(), "data_wait_share": outcome.data_wait_share, **more}
        best = 0
        if strategy_type(config.strategy).own_batches:
            meta["epochs"] = outcome.history
            judged = [config.judged(found) for found, _ in improvements(outcome.history, config)]
            validated = any(config.judged(record) is not None for record in outcome.history)
            judged = judged or [math.inf if validated else outcome.history[-1]["loss"]]  # NaN is never better
            best = _best(client.agree("outcome", {"loss": judged[-1]}))
        if self.world.rank != best:
            return RankResult(meta)
        meta |= {"history": outcome.history, "confusion": outcome.confusion, "out_of_time": outcome.out_of_time}
        meta |= {"steps_per_epoch": plan.steps, "fingerprint": run.fingerprint}
        meta |= {"seed": job.recipe.module_seed(config.seed)}
        return RankResult(meta, packed_weights(outcome.state))

    @contextmanager
    def together(
        self, job: RankJob, client: Client, *, without: int | None = None, lone: bool = False
    ) -> Iterator[Run]:
        """Context in which the ranks work on their rows together: rows placed, checkpoints found, process group open.

        What `job` says of the rows is what they were read with; `without` is the fold to leave out. If `lone`, a single
        rank has a process group, too.
        """
        peers = self._peers_without(without)
        self.shard.leave_out(without)
        clock, self._of_reading = Clock(self._of_reading), {}  # A later training has not waited for the rows.
        team, config, plan = place(self.shard, self.world, job, peers, client)
        strategy, options = strategy_for(config.strategy, config.strategy_params)
        validation_rows = max(peer["validation"] for peer in peers)
        if strategy.own_batches:  # the rank whose epochs count is only known at the end
            client.publish(progress=self.world.is_main, epochs=False)
            validation_rows = self.shard.validation_rows
        fingerprint = f"{sum(peer['fingerprint'] for peer in peers) % 2**64:016x}"
        known = {"data": fingerprint, _SPLIT: _PLACE if self._by_place else _KEYS}
        run = Run(
            shard=self.shard,
            team=team,
            config=config,
            plan=plan,
            validation_rows=validation_rows,
            fingerprint=fingerprint,
            checkpointer=find_checkpoint(job, known, self.world, client),
            clock=clock,
        )
        limit = timedelta(seconds=job.collective_seconds)
        lone = lone or strategy.needs_group(options)
        opened = process_group(team, client.store, timeout=limit, lone=lone, report=client.fail)
        with run.checkpointer or nullcontext(), opened:
            clock.lap("group")
            yield run
        clock.lap("train")

    def facts(self) -> dict[str, Any]:
        """Returns what the driver shows of the rows: their number, bytes and place, and the rank's host and device."""
        return {**self._of_rows(), **self._facts_of_folds()}

    def _of_rows(self) -> dict[str, Any]:
        shard, world = self.shard, self.world
        return {
            "rows": shard.rows,
            "validation_rows": shard.validation_rows,
            "bytes": shard.bytes,
            "storage": shard.storage,
            "host": world.host,
            "device": world.device,
            "dropped": shard.dropped,
        }

    def inputs(self, fold: int, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields the inputs of this rank's rows of a fold, at most `size` rows at a time; for rows in memory."""
        assert isinstance(self.shard, InMemoryShard)
        return self.shard.inputs(fold, size)

    def carried(self, fold: int) -> dict[str, Any]:
        """Returns the carried columns of this rank's rows of a fold, float64, in the order of `inputs`."""
        assert self.shard.folds is not None
        return self.shard.folds.carried(fold)

    def _facts_of_folds(self) -> dict[str, Any]:
        """Returns what the driver needs to know of this rank's folds."""
        folds = self.shard.folds
        if folds is None:
            return {}
        views = [[peer["rows"] for peer in self._peers_without(fold)] for fold in folds.counts if fold >= 0]
        uneven = self._max_imbalance is not None and any(_imbalanced(view, self._max_imbalance) for view in views)
        counts = {str(fold): of for fold, of in folds.counts.items()}
        return {"folds": counts, "uneven_folds": uneven, "nulls": folds.nulls}

    def _peers_without(self, fold: int | None) -> list[dict[str, Any]]:
        """Returns the facts about each rank's rows outside of a fold."""
        if fold is None:
            return self._peers
        found = []
        for peer in self._peers:
            rows, marked, keys = peer["folds"].get(str(fold), (0, 0, 0))
            fingerprint = (peer["fingerprint"] - keys) % 2**64
            left = {"rows": peer["rows"] - rows, "validation": peer["validation"] - marked}
            found.append({**peer, **left, "fingerprint": fingerprint})
        return found

    def close(self) -> None:
        """Frees the rows; can be called twice."""
        self.shard.close()


def find_checkpoint(job: RankJob, known: Mapping[str, Any], world: World, client: Client) -> Checkpointer | None:
    """Returns the checkpointer of a job, which knows the checkpoint to resume from; `None` without checkpoints.

    `known` is what identifies the training besides the `job` of its checkpoint configuration.
    """
    config = job.checkpoint
    if config is None:
        return None
    client.enter("looking for a checkpoint")
    options: dict[str, Any] = {"fixed": job.fixed_epochs, "best_delta": job.config.best_delta}
    return Checkpointer(config, {**config.job, **known}, world, client, **options)


def _read(batches: Iterable[pa.RecordBatch], world: World, job: RankJob, client: Client) -> Shard:
    """Returns this rank's rows, checked."""
    return read_shard(
        client.moving(batches),
        job.columns,
        placeholder=job.placeholder,
        storage=_row_storage(job.storage, world),
        budget=job.storage.budget * 10**6,
        by_key=job.by_key,
        by_length=job.config.micro_batch_size is not None or job.config.accumulation_steps > 1,
        moved=client.moved,
    )


def _row_storage(storage: StorageConfig, world: World) -> RowStorage:
    """Returns the storage for a rank's rows; on disk, it uses Spark's local directories."""
    if storage.kind == "memory":
        return RowStorage()
    directory = local_directory(world.local_rank)
    return RowStorage(directory, budget=0 if storage.kind == "disk" else storage.budget * 10**6)


def _by_place(config: CheckpointConfig | None, client: Client) -> bool | None:
    """Returns whether the training that goes on has split its rows by position; `None` if none goes on."""
    if config is None:
        return None
    found = unfinished(CheckpointStore(config.directory, moved=client.moved), config.owner, config.job)
    return None if found is None or _SPLIT not in found.job else found.job[_SPLIT] == _PLACE


def _meet(shard: Shard, world: World, client: Client, by_place: bool | None) -> list[dict[str, Any]]:
    """Waits until all ranks have read their rows; returns facts about each rank's rows, in rank order."""
    return client.agree(
        "shard",
        {
            "rows": shard.rows,
            "validation": shard.validation_rows,
            "fingerprint": shard.fingerprint,
            "folds": {} if shard.folds is None else {str(fold): of for fold, of in shard.folds.counts.items()},
            "device": world.device,
            "host": world.host,
            "by_place": by_place,
            "groups": shard.groups,
        },
    )


def _tell_of_groups(groups: Groups, peers: Sequence[Mapping[str, Any]], client: Client) -> None:
    """Warns of groups that are too short for a window, and of shares of the ranks that are too different."""
    found = [peer["groups"] for peer in peers]
    count, short, rows, gaps = (sum(each[name] for each in found) for name in ("groups", "short", "rows", "gaps"))
    largest = max(each["largest"] for each in found)
    if short and groups.window is not None:
        client.warn(
            f"{short} of {counted(count, 'group', 'groups')} have fewer than {groups.window.rows} rows, those of a "
            "window: nothing is trained of them"
        )
    if gaps:
        client.warn(f"column {groups.order!r} has {counted(gaps, 'gap', 'gaps')}: no window across one is trained")
    if largest * len(peers) > rows and len(peers) > 1:
        client.warn(
            f"a group has {largest} of {rows} rows, more than a worker's share: groups are not divided, and the others "
            f"wait for its worker\n  -> set a smaller numWorkers{'' if groups.group else ', or groupCol'}"
        )
    elif idle := sum(not peer["rows"] for peer in peers):
        client.warn(
            f"{idle} of {len(peers)} workers {'has' if idle == 1 else 'have'} nothing to train: a group goes to the "
            "worker of its hash, and there are few\n  -> set a smaller numWorkers"
        )


def _on_one_kind(world: World, peers: Sequence[Mapping[str, Any]], client: Client) -> World:
    """Returns this rank's world, on the CPU if the ranks have different types of devices.

    Ranks on different types would open different process groups and wait for each other.
    """
    kinds = {peer["device"].partition(":")[0] for peer in peers}  # this rank's torch may not know a peer's device
    if len(kinds) == 1:
        return world
    if world.is_main:
        without = sorted({peer["host"] for peer in peers if peer["device"] == "cpu"})
        client.warn(
            f"all ranks train on the CPU: those on {', '.join(without)} have no {'/'.join(sorted(kinds - {'cpu'}))} "
            "device for each\n  -> give every executor its GPUs, or lower numWorkers; device='cpu' says it is meant"
        )
    return replace(world, device="cpu")


def _best(outcomes: list[dict[str, Any]]) -> int:
    """Returns the rank with the best validation of its weights or, without validation, the smallest training loss."""

    def loss(rank: int) -> float:
        value = float(outcomes[rank]["loss"])
        return math.inf if math.isnan(value) else value

    return min(range(len(outcomes)), key=loss)


def _import_dynamo() -> None:
    with uncollected():
        importlib.import_module("torch._dynamo")


def _imbalanced(counts: list[int], share: float) -> bool:
    """Returns whether the largest shard exceeds the mean by more than `share` and chance explain.

    Sizes of a split by hash have a standard deviation of about `sqrt(mean)`; four times that is never chance.
    """
    mean = sum(counts) / len(counts)
    return max(counts) > mean * (1 + share) + 4 * math.sqrt(mean)
