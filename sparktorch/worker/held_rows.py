"""The rows of one rank, ready for training: read once, trained any number of times."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
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
from sparktorch.worker.peers import imbalanced, meet, on_one_kind, warn_of_groups
from sparktorch.worker.placement import assign_positions

__all__ = ["HeldRows", "Run", "find_checkpoint"]

# Checkpoints say under this name how the rows of their training were split.
_SPLIT, _BY_POSITION, _BY_KEYS = "rows", "split by their position", "split by their keys"


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
    """What a rank knows while the ranks work on their rows in a group.

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
    """The rows of one rank, read and checked, of which the other ranks know.

    Attributes:
        world: This rank's place.
        shard: Its rows.
        imbalanced: Whether the rows are to be split anew: the ranks have too different numbers of rows, or the rows of
            the training that goes on were split in another way.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], world: World, job: RankJob, client: Client) -> None:
        """Reads the rows, whose columns `job.columns` names, and waits until the other ranks have read theirs."""
        clock = Clock()
        # The first optimizer of a process imports torch._dynamo, which takes most of a second: a thread does it while
        # rows arrive.
        threading.Thread(target=_import_dynamo, daemon=True).start()
        client.enter("loading")
        self.shard = shard = read_shard(
            client.moving(batches),
            job.columns,
            placeholder=job.placeholder,
            storage=_row_storage(job.storage, world),
            budget=job.storage.budget * 10**6,
            by_key=job.by_key,
            by_length=job.config.micro_batch_size is not None or job.config.accumulation_steps > 1,
            moved=client.moved,
        )
        with ExitStack() as undo:
            undo.callback(self.close)
            clock.lap("load")
            client.enter("waiting for the other ranks")
            saved_by_position = _split_by_position(job.checkpoint, client) if world.is_main else None
            self._peers = meet(shard, world, client, saved_by_position)
            clock.lap("wait")
            self._reading_seconds = clock.laps
            self.world = world = on_one_kind(world, self._peers, client)
            counts = [peer["rows"] for peer in self._peers]
            if job.columns.groups is not None and world.is_main:
                warn_of_groups(job.columns.groups, self._peers, client)
            self._max_imbalance = job.max_imbalance
            # A training that goes on needs its rows split as they were, however uneven that is.
            self._by_position, saved_by_position = job.by_place, self._peers[0]["by_place"]
            if saved_by_position is None:
                self.imbalanced = job.max_imbalance is not None and imbalanced(counts, job.max_imbalance)
            else:
                self.imbalanced = saved_by_position != job.by_place
            if not self.imbalanced:
                select(world.device)
                if not is_host(world.device):
                    forget_peaks(world.device)
                shard.to(world.device)
            undo.pop_all()

    def fit(self, job: TrainJob, client: Client, *, without: int | None = None) -> RankResult:
        """Trains on the rows; takes and raises what `in_group` does."""
        with self.in_group(job, client, without=without) as run:
            config, plan = run.config, run.plan
            if self.world.is_main and plan.rows < config.batch_size:
                rows = counted(plan.rows, "row", "rows")
                if job.columns.groups is not None:
                    rows = counted(plan.rows, "sample", "samples")
                client.warn(f"there are {rows}, fewer than batchSize: each epoch is one step")
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
        meta: dict[str, Any] = {
            **self._row_facts(),
            "data_wait_share": outcome.data_wait_share,
            "threads": self.world.threads,
            "seconds": run.seconds,
            **peaks(self.world.device),
        }
        best = 0
        if strategy_type(config.strategy).own_batches:
            # Each rank has trained a model: the one with the best validation returns its weights.
            meta["epochs"] = outcome.history
            judged = [config.judged(validation) for validation, _ in improvements(outcome.history, config)]
            loss: float | None
            if judged:
                loss = judged[-1]
            elif any(config.judged(record) is not None for record in outcome.history):
                loss = math.inf  # No validation is the best one: all were NaN.
            else:
                loss = outcome.history[-1]["loss"]
            best = _best(client.agree("outcome", {"loss": loss}))
        if self.world.rank != best:
            return RankResult(meta)
        meta |= {
            "history": outcome.history,
            "confusion": outcome.confusion,
            "out_of_time": outcome.out_of_time,
            "steps_per_epoch": plan.steps,
            "fingerprint": run.fingerprint,
            "seed": job.recipe.module_seed(config.seed),
        }
        return RankResult(meta, packed_weights(outcome.state))

    @contextmanager
    def in_group(
        self, job: RankJob, client: Client, *, without: int | None = None, lone: bool = False
    ) -> Iterator[Run]:
        """Context in which the ranks work on their rows in a group.

        In it, the rows have their positions in the global order, the checkpoint to resume from is known, and the
        process group is open. `job` describes the rows as they were read; `without` is the fold to leave out. If
        `lone`, a single rank has a process group, too.
        """
        peers = self._peers_without(without)
        self.shard.leave_out(without)
        clock = Clock(self._reading_seconds)
        team, config, plan = assign_positions(self.shard, self.world, job, peers, client)
        strategy, options = strategy_for(config.strategy, config.strategy_params)
        # With collective forward passes, every rank validates in as many batches as the one with the most rows.
        validation_rows = max(peer["validation"] for peer in peers)
        if strategy.own_batches:  # Which rank's epochs count is only known at the end.
            client.publish(progress=self.world.is_main, epochs=False)
            validation_rows = self.shard.validation_rows
        fingerprint = f"{sum(peer['fingerprint'] for peer in peers) % 2**64:016x}"
        identity = {"data": fingerprint, _SPLIT: _BY_POSITION if self._by_position else _BY_KEYS}
        run = Run(
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
        lone = lone or strategy.needs_group(options)
        opened = process_group(team, client.store, timeout=limit, lone=lone, report=client.fail)
        with run.checkpointer or nullcontext(), opened:
            clock.lap("group")
            yield run
        clock.lap("train")

    def facts(self) -> dict[str, Any]:
        """Returns what the driver must know of the rows: their number, bytes, storage, host, device, and folds."""
        facts = self._row_facts()
        folds = self.shard.folds
        if folds is None:
            return facts
        counts_without = [[peer["rows"] for peer in self._peers_without(fold)] for fold in folds.counts if fold >= 0]
        facts["folds"] = {str(fold): counts for fold, counts in folds.counts.items()}
        facts["uneven_folds"] = self._max_imbalance is not None and any(
            imbalanced(counts, self._max_imbalance) for counts in counts_without
        )
        facts["nulls"] = folds.nulls
        return facts

    def _row_facts(self) -> dict[str, Any]:
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
    """Returns the checkpointer of a job, which knows the checkpoint to resume from; `None` without checkpoints.

    `identity` is what identifies the training besides the `job` of its checkpoint configuration.
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


def _split_by_position(config: CheckpointConfig | None, client: Client) -> bool | None:
    """Returns whether the training that goes on has split its rows by position; `None` if none goes on."""
    if config is None:
        return None
    manifest = unfinished(CheckpointStore(config.directory, moved=client.moved), config.owner, config.job)
    if manifest is None or _SPLIT not in manifest.job:
        return None
    return bool(manifest.job[_SPLIT] == _BY_POSITION)


def _best(outcomes: list[dict[str, Any]]) -> int:
    """Returns the rank with the best validation of its weights or, without validation, the smallest training loss."""

    def loss(rank: int) -> float:
        value = float(outcomes[rank]["loss"])
        return math.inf if math.isnan(value) else value

    return min(range(len(outcomes)), key=loss)


def _import_dynamo() -> None:
    with uncollected():
        importlib.import_module("torch._dynamo")
