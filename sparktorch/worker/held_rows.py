"""The rows of one rank, ready for training: read once, trained any number of times."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
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
from sparktorch.worker.peers import fold_counts, is_imbalanced, meet, on_one_device_type, warn_of_groups
from sparktorch.worker.placement import assign_positions

__all__ = ["GroupContext", "HeldRows", "find_checkpoint"]

# Under this name, a checkpoint says how the rows of its training were split.
_SPLIT = "rows"
_BY_POSITION = "split by their position"
_BY_KEYS = "split by their keys"


class Clock:
    """Measures laps, in seconds by name, from its creation on.

    Attributes:
        laps: The seconds of each lap so far, after those that the clock was created with.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        """Starts the first lap; `before` has the laps that another clock has measured."""
        self.laps = dict(before or {})
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Ends a lap, which began when the last one ended."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


@dataclass(frozen=True, kw_only=True)
class GroupContext:
    """The facts that a rank knows while the ranks work on their rows in a process group.

    Attributes:
        shard: The rank's rows, with their positions in the order of all rows.
        team: The world of the ranks that train one model together; an independent rank is alone in it.
        config: The configuration with which this rank trains.
        plan: Says which row is trained when.
        validation_rows: The largest number of validation rows that a rank of the team has.
        fingerprint: Identifies the training rows of all ranks.
        checkpointer: Saves the training; `None` without checkpoints.
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
        """Seconds of each phase; with checkpoints, also those of saving."""
        if self.checkpointer is None:
            return self.clock.laps
        return self.clock.laps | self.checkpointer.seconds


class HeldRows:
    """The rows of one rank, read and checked; the other ranks know how many they are.

    Attributes:
        world: This rank's position among the ranks, and its device.
        shard: This rank's rows.
        needs_new_split: Whether the rows must be split anew: the numbers of rows in the ranks differ too much, or the
            training that goes on had its rows split in another way. Nothing can be done with the rows then.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], world: World, job: RankJob, client: Client) -> None:
        """Reads the rows, whose columns `job.columns` names, and waits until the other ranks have read theirs."""
        clock = Clock()
        # The first optimizer of a process imports torch._dynamo, which takes most of a second: a thread does it while
        # rows arrive.
        threading.Thread(target=_import_dynamo, daemon=True).start()
        client.enter("loading")
        self.shard = _read_rows(batches, world, job, client)
        with ExitStack() as undo:
            undo.callback(self.close)
            clock.lap("load")
            client.enter("waiting for the other ranks")
            # Only rank 0 looks into the checkpoint.
            saved_by_position = _is_saved_by_position(job.checkpoint, client) if world.is_main else None
            self._peers = meet(self.shard, world, client, saved_by_position)
            clock.lap("wait")
            self._reading_seconds = clock.laps
            self.world = on_one_device_type(world, self._peers, client)
            if job.columns.groups is not None and world.is_main:
                warn_of_groups(job.columns.groups, self._peers, client)
            self._max_imbalance = job.max_imbalance
            self._by_position = job.by_position
            self.needs_new_split = self._is_split_wrongly()
            if not self.needs_new_split:
                self._move_to_device()
            undo.pop_all()

    def _is_split_wrongly(self) -> bool:
        """Returns whether the rows are split in another way than a saved training needs, or too unevenly."""
        saved_by_position = self._peers[0]["saved_by_position"]
        if saved_by_position is not None:
            # A training that goes on needs its rows split as they were, however uneven this split is.
            return bool(saved_by_position != self._by_position)
        return self._is_uneven(self._peers)

    def _is_uneven(self, peers: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether the numbers of rows in the ranks differ by more than the job allows."""
        return self._max_imbalance is not None and is_imbalanced([peer["rows"] for peer in peers], self._max_imbalance)

    def _move_to_device(self) -> None:
        device = self.world.device
        select(device)
        if not is_host(device):
            forget_peaks(device)
        self.shard.to(device)

    def fit(self, job: TrainJob, client: Client, *, without: int | None = None) -> RankResult:
        """Trains on the rows, except for those of the fold `without`; raises what `in_group` does."""
        with self.in_group(job, client, without=without) as group:
            config = group.config
            plan = group.plan
            if self.world.is_main and plan.rows < config.batch_size:
                one, many = ("row", "rows") if job.columns.groups is None else ("sample", "samples")
                client.warn(f"there are {counted(plan.rows, one, many)}, fewer than batchSize: each epoch is one step")
            outcome = train(
                self.shard,
                job.recipe,
                config,
                group.team,
                client,
                steps=plan.steps,
                validation_rows=group.validation_rows,
                classes=job.columns.classes,
                checkpointer=group.checkpointer,
            )
        if outcome is None:  # `train` returns `None` after a pause.
            client.pause.paused = True
            return RankResult({"paused": True})
        meta: dict[str, Any] = {
            **self._row_facts(),
            "data_wait_share": outcome.data_wait_share,
            "threads": self.world.threads,
            "seconds": group.seconds,
            **peaks(self.world.device),
        }
        best_rank = 0
        if strategy_type(config.strategy).own_batches:
            # Each rank has trained a model of its own: the rank with the best model returns its weights.
            meta["epochs"] = outcome.history
            best_rank = _best_rank(client.agree("outcome", {"badness": _badness(outcome.history, config)}))
        if self.world.rank != best_rank:
            return RankResult(meta)
        meta |= {
            "history": outcome.history,
            "confusion": outcome.confusion,
            "out_of_time": outcome.out_of_time,
            "steps_per_epoch": plan.steps,
            "fingerprint": group.fingerprint,
            "seed": job.recipe.module_seed(config.seed),
        }
        return RankResult(meta, packed_weights(outcome.state))

    @contextmanager
    def in_group(
        self, job: RankJob, client: Client, *, without: int | None = None, lone: bool = False
    ) -> Iterator[GroupContext]:
        """Context in which the ranks work on their rows in a process group.

        In it, the rows have their positions in the global order, the checkpoint to resume from is known, and the
        process group is open. `job` describes the rows as they were read; `without` is the fold to leave out. If
        `lone`, a single rank has a process group, too.

        Raises:
            ColumnError: There are no rows to train on.
            ConfigError: A metric of validation rows is needed, and no row is marked for validation.
            PersistenceError: The checkpoints cannot be used; see `Checkpointer`.
        """
        peers = self._peers_without(without)
        self.shard.leave_out(without)
        clock = Clock(self._reading_seconds)
        team, config, plan = assign_positions(self.shard, self.world, job, peers, client)
        strategy, options = strategy_for(config.strategy, config.strategy_params)
        # If forward passes are collectives, every rank validates in as many batches as the rank with the most rows.
        validation_rows = max(peer["validation"] for peer in peers)
        if strategy.own_batches:
            # The driver learns only at the end which rank's epochs count.
            client.publish(progress=self.world.is_main, epochs=False)
            validation_rows = self.shard.validation_rows
        fingerprint = f"{sum(peer['fingerprint'] for peer in peers) % 2**64:016x}"
        identity = {"data": fingerprint, _SPLIT: _BY_POSITION if self._by_position else _BY_KEYS}
        group = GroupContext(
            shard=self.shard,
            team=team,
            config=config,
            plan=plan,
            validation_rows=validation_rows,
            fingerprint=fingerprint,
            checkpointer=find_checkpoint(job, identity, self.world, client),
            clock=clock,
        )
        self._reading_seconds = {}  # The first training has waited for the rows; later ones have not.
        limit = timedelta(seconds=job.collective_seconds)
        needs_group = lone or strategy.needs_group(options)
        opening = process_group(team, client.store, timeout=limit, lone=needs_group, report=client.fail)
        with group.checkpointer or nullcontext(), opening:
            clock.lap("group")
            yield group
        clock.lap("train")

    def facts(self) -> dict[str, Any]:
        """Returns what the driver must know about the rows: their number, bytes, storage, host, device, and folds."""
        facts = self._row_facts()
        folds = self.shard.folds
        if folds is None:
            return facts
        facts["folds"] = fold_counts(self.shard)
        # Rows of fold -1 are in no fold: they train in every fold, and are never left out.
        facts["uneven_folds"] = any(self._is_uneven(self._peers_without(fold)) for fold in folds.counts if fold >= 0)
        facts["nulls"] = folds.nulls
        return facts

    def _row_facts(self) -> dict[str, Any]:
        shard = self.shard
        return {
            "rows": shard.rows,
            "validation_rows": shard.validation_rows,
            "bytes": shard.bytes,
            "storage": shard.storage,
            "host": self.world.host,
            "device": self.world.device,
            "dropped": shard.dropped,
        }

    def inputs(self, fold: int, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields the inputs of this rank's rows in a fold, at most `size` at a time; they must be in memory."""
        assert isinstance(self.shard, InMemoryShard)
        return self.shard.inputs(fold, size)

    def carried(self, fold: int) -> dict[str, Any]:
        """Returns the carried columns of this rank's rows in a fold, float64, in the order of `inputs`."""
        assert self.shard.folds is not None
        return self.shard.folds.carried(fold)

    def _peers_without(self, fold: int | None) -> list[dict[str, Any]]:
        """Returns the facts about each rank's rows outside of a fold."""
        if fold is None:
            return self._peers
        peers = []
        for peer in self._peers:
            rows, marked, keys = peer["folds"].get(str(fold), (0, 0, 0))
            outside = {
                "rows": peer["rows"] - rows,
                "validation": peer["validation"] - marked,
                # The fingerprint is the sum of the rows' keys, so the fold's keys can be subtracted.
                "fingerprint": (peer["fingerprint"] - keys) % 2**64,
            }
            peers.append({**peer, **outside})
        return peers

    def close(self) -> None:
        """Frees the rows; can be called twice."""
        self.shard.close()


def find_checkpoint(job: RankJob, identity: Mapping[str, Any], world: World, client: Client) -> Checkpointer | None:
    """Returns the checkpointer of a job, which finds the checkpoint to resume from; `None` without checkpoints.

    `identity` has further settings that identify the training, besides those of the checkpoint configuration.
    """
    config = job.checkpoint
    if config is None:
        return None
    client.enter("looking for a checkpoint")
    return Checkpointer(
        config, {**config.job, **identity}, world, client, fixed=job.fixed_epochs, best_delta=job.config.best_delta
    )


def _row_storage(storage: StorageConfig, world: World) -> RowStorage:
    """Returns the storage for a rank's rows; on disk, it uses Spark's local directories."""
    if storage.kind == "memory":
        return RowStorage()
    directory = local_directory(world.local_rank)
    return RowStorage(directory, budget=0 if storage.kind == "disk" else storage.budget * 10**6)


def _read_rows(batches: Iterable[pa.RecordBatch], world: World, job: RankJob, client: Client) -> Shard:
    """Reads a rank's rows, and checks them."""
    return read_shard(
        client.moving(batches),
        job.columns,
        placeholder=job.placeholder,
        storage=_row_storage(job.storage, world),
        budget=job.storage.budget * 10**6,
        by_key=job.order_by_key,
        by_length=job.config.micro_batch_size is not None or job.config.accumulation_steps > 1,
        moved=client.moved,
    )


def _is_saved_by_position(config: CheckpointConfig | None, client: Client) -> bool | None:
    """Returns whether the training that goes on has split its rows by position; `None` if no training goes on."""
    if config is None:
        return None
    manifest = unfinished(CheckpointStore(config.directory, moved=client.moved), config.owner, config.job)
    if manifest is None or _SPLIT not in manifest.job:
        return None
    return bool(manifest.job[_SPLIT] == _BY_POSITION)


def _badness(history: Sequence[Mapping[str, Any]], config: TrainConfig) -> float:
    """Returns a number by which ranks compare their models; the smallest is the best.

    It is the value of the best validation, as `TrainConfig.judged` returns it. Without validation, it is the last
    training loss.
    """
    best_values = [config.judged(validation) for validation, _ in improvements(history, config)]
    if best_values:
        value = best_values[-1]
        assert value is not None  # `improvements` leaves out validations without the metric.
        return value
    if any(config.judged(record) is not None for record in history):
        return math.inf  # No validation was the best one, because all values were NaN.
    return float(history[-1]["loss"])


def _best_rank(outcomes: Sequence[Mapping[str, Any]]) -> int:
    """Returns the rank with the smallest badness; NaN counts as the largest."""

    def badness(rank: int) -> float:
        value = float(outcomes[rank]["badness"])
        return math.inf if math.isnan(value) else value

    return min(range(len(outcomes)), key=badness)


def _import_dynamo() -> None:
    with uncollected():
        importlib.import_module("torch._dynamo")
