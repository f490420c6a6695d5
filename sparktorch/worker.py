"""The body of a barrier task, without Spark: a rank's batches in, what it learned out.

Tests and GPU machines call `train_partition` directly.
"""

from __future__ import annotations

import gc
import importlib
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import pyarrow as pa
import torch

from sparktorch.base.config import CheckpointConfig, StorageConfig, TrainConfig
from sparktorch.base.devices import is_host, let_go, select
from sparktorch.base.state_dict import pack_state
from sparktorch.base.world import World
from sparktorch.data.columns import Columns
from sparktorch.data.dataset.base import Shard
from sparktorch.data.dataset.reader import balanced, read_shard
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.data.storage import InMemory, OnDisk, RowStorage, WithinBudget, local_directory
from sparktorch.distributed.client import Client
from sparktorch.distributed.os_memory import forget_peaks, peaks
from sparktorch.distributed.process_group import process_group
from sparktorch.errors import ColumnError
from sparktorch.train.checkpoint.checkpointer import Checkpointer
from sparktorch.train.loop import Outcome, train
from sparktorch.train.numerics.torch_errors import explained
from sparktorch.train.recipe.dry_run import DryRunResult
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import strategy_options, strategy_type

__all__ = ["RankResult", "TrainJob", "train_partition", "try_in_rank"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Everything a rank needs besides its rows and its place.

    Attributes:
        columns: Which columns become which tensors.
        recipe: What is trained.
        config: How it is trained.
        max_imbalance: The largest share by which a rank's rows may exceed the mean before the
            ranks give up for a better split; `None` accepts any split.
        checkpoint: Where and how often its state is saved; `None` for nowhere.
        placeholder: Any one row of the training set, for a rank without rows to stand in with.
        storage: Where a rank keeps its rows.
        by_key: Whether the order of training is that of the rows' keys, or of their places.
        collective_seconds: How long a rank waits for the others in a collective.
    """

    columns: Columns
    recipe: Recipe
    config: TrainConfig
    max_imbalance: float | None = 0.1
    checkpoint: CheckpointConfig | None = None
    placeholder: pa.RecordBatch | None = None
    storage: StorageConfig = field(default_factory=StorageConfig)
    by_key: bool = True
    collective_seconds: float = 1800.0


@dataclass
class RankResult:
    """What a rank hands back to the driver.

    Attributes:
        meta: JSON-ready facts: rows, times, and from the rank that speaks for all (rank 0, or the best of
            independent ones) history, confusion matrix and fingerprint.
        payload: From that rank, the model's state as a safetensors file; elsewhere empty.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


def train_partition(batches: Iterable[pa.RecordBatch], *, world: World, job: TrainJob, client: Client) -> RankResult:
    """Trains on one partition as one rank.

    The rows come before the communicator: every rank reads and checks its shard, the ranks agree
    through the store that all is well, and only then is the process group opened. A bad row is an
    error with a column, never a hang.

    Args:
        batches: The partition's record batches, under the wire names of `job.columns`.
        world: This rank's place.
        job: What to train and how.
        client: The line to the driver and to the other ranks.

    Raises:
        ColumnError: The rows cannot be trained on.
        ClusterError: They do not fit on disk.
        PeerFailure: Another rank failed before training began.
        Cancelled: The driver cancelled the fit.
    """
    with _leaving_none_of(world.device):
        return _train(batches, world, job, client)


def _train(batches: Iterable[pa.RecordBatch], world: World, job: TrainJob, client: Client) -> RankResult:
    torch.set_num_threads(world.threads)
    clock = _Clock()
    forget_peaks("cpu")
    # The first optimizer of a process imports torch._dynamo, most of a second: meanwhile, rows arrive.
    threading.Thread(target=_import_dynamo, daemon=True).start()
    client.enter("loading")
    with closing(_read(batches, world, job, client)) as shard:
        clock.lap("load")
        client.enter("waiting for the other ranks")
        peers = _meet(shard, world, job, client)
        clock.lap("wait")
        world = _on_one_kind(world, peers, client)
        counts = [peer["rows"] for peer in peers]
        if job.max_imbalance is not None and _imbalanced(counts, job.max_imbalance):
            return RankResult({"imbalanced": True, "rows": shard.rows})
        select(world.device)
        if not is_host(world.device):
            forget_peaks(world.device)
        shard.to(world.device)
        team, config, plan = _place(shard, world, job, peers)
        strategy, options = strategy_type(config.strategy), strategy_options(config.strategy, config.strategy_params)
        independent = strategy.own_batches
        if independent:  # whose epochs count is known at the end only
            client.publish(progress=world.is_main, epochs=False)
        fingerprint = f"{sum(peer['fingerprint'] for peer in peers) % 2**64:016x}"
        checkpointer = None
        if job.checkpoint is not None:
            client.enter("looking for a checkpoint")
            checkpointer = Checkpointer(job.checkpoint, {**job.checkpoint.job, "data": fingerprint}, world, client)
        limit = timedelta(seconds=job.collective_seconds)
        lone = strategy.needs_group(options)
        group = process_group(team, client.store, timeout=limit, lone=lone, report=client.fail)
        with checkpointer or nullcontext(), group:
            clock.lap("group")
            outcome = train(
                shard,
                job.recipe,
                config,
                team,
                client,
                steps=plan.steps,
                validation_rows=shard.validation_rows if independent else max(peer["validation"] for peer in peers),
                classes=job.columns.classes,
                checkpointer=checkpointer,
            )
        clock.lap("train")
        seconds = clock.laps | (checkpointer.seconds if checkpointer else {})
        meta = _facts(shard, world, outcome, seconds)
        best = 0
        if independent:
            meta["epochs"] = outcome.history
            best = _best(client.agree("outcome", {"record": outcome.history[-1]}))
        if world.rank != best:
            return RankResult(meta)
        meta |= {"history": outcome.history, "confusion": outcome.confusion}
        meta |= {"steps_per_epoch": plan.steps, "fingerprint": fingerprint}
        return RankResult(meta, pack_state(outcome.state))


def try_in_rank(
    batches: Iterable[pa.RecordBatch],
    *,
    world: World,
    client: Client,
    run: Callable[..., DryRunResult],
    config: TrainConfig,
) -> RankResult:
    """Runs the dry run in a rank, on its device.

    Args:
        batches: Not looked at.
        world: This rank's place.
        client: The line to the driver.
        run: The dry run, called with `device`.
        config: Of the training, for what it could save of the device's memory.

    Raises:
        ClusterError: The device's memory is full.
    """
    for _ in batches:  # a worker that leaves input unread is not used again
        pass
    client.enter("trying the first row")
    select(world.device)
    with _leaving_none_of(world.device), explained(config):
        return RankResult(*run(device=world.device).packed())


@contextmanager
def _leaving_none_of(device: str) -> Iterator[None]:
    """A block that frees what it takes of a device's memory: Python workers are used again, and others have it then."""
    try:
        yield
    except BaseException as error:
        if not is_host(device):
            _clear_frames(error)
            with suppress(Exception):  # after some errors, CUDA answers every call with the same one
                let_go(device)
        raise
    let_go(device)


def _clear_frames(error: BaseException | None) -> None:
    """Lets go of what the frames hold in which an error was raised, and those that it was raised from: it lives on."""
    if error is not None:
        traceback.clear_frames(error.__traceback__)
        _clear_frames(error.__cause__)
        _clear_frames(error.__context__ if error.__context__ is not error.__cause__ else None)


def _read(batches: Iterable[pa.RecordBatch], world: World, job: TrainJob, client: Client) -> Shard:
    """Returns this rank's rows, checked."""
    return read_shard(
        client.moving(batches),
        job.columns,
        placeholder=job.placeholder,
        storage=_row_storage(job.storage, world),
        budget=job.storage.budget * 10**6,
        by_key=job.by_key,
        by_length=job.config.micro_batch_size is not None or job.config.accumulation_steps > 1,
    )


def _row_storage(storage: StorageConfig, world: World) -> RowStorage:
    """Returns the place for a rank's rows; those on disk are with what Spark keeps there."""
    if storage.kind == "memory":
        return InMemory()
    directory = local_directory(world.local_rank)
    return OnDisk(directory) if storage.kind == "disk" else WithinBudget(storage.budget * 10**6, directory)


def _meet(shard: Shard, world: World, job: TrainJob, client: Client) -> list[dict[str, Any]]:
    """Returns what every rank has to say of its rows, by rank, once all have read theirs."""
    balances = job.config.class_weights == "balanced"
    return client.agree(
        "shard",
        {
            "rows": shard.rows,
            "validation": shard.validation_rows,
            "fingerprint": shard.fingerprint,
            "classes": shard.weight_by_class(job.columns.classes or 0) if balances else [],
            "device": world.device,
            "host": world.host,
        },
    )


def _place(
    shard: Shard, world: World, job: TrainJob, peers: Sequence[Mapping[str, Any]]
) -> tuple[World, TrainConfig, SamplingPlan]:
    """Places this rank's rows among those of its team, and weighs their classes.

    Returns:
        The ranks that train one model, of which independent ranks have none but themselves, the configuration of this
        rank's training, and its plan.

    Raises:
        ColumnError: There are no rows to train on.
    """
    config, counts = job.config, [peer["rows"] for peer in peers]
    strategy, options = strategy_type(config.strategy), strategy_options(config.strategy, config.strategy_params)
    independent = strategy.own_batches
    if not (min(counts) if independent else sum(counts)):
        raise ColumnError(
            "there are no rows to train on" + (f" for rank {counts.index(0)}" if independent else ""),
            hint="is every row marked for validation?" if not sum(counts) else "set a smaller numWorkers",
        )
    team, rows, first = world, sum(counts), sum(counts[: world.rank])
    if independent:
        team, rows, first = _alone(world), counts[world.rank], 0
        if not strategy.makes_validation(options):  # folds differ in their rows alone
            config = replace(config, seed=config.seed + world.rank)
    plan = SamplingPlan(
        rows=rows, batch_size=config.batch_size, seed=config.seed, shuffle=config.shuffle, block=config.shuffle_block
    )
    shard.place(first, plan, epochs=config.epochs)
    _weigh_classes(shard, config.class_weights, [peers[world.rank]] if independent else peers)
    return team, config, plan


def _facts(shard: Shard, world: World, outcome: Outcome, seconds: dict[str, float]) -> dict[str, Any]:
    """Returns what every rank reports of its training."""
    return {
        "rows": shard.rows,
        "validation_rows": shard.validation_rows,
        "bytes": shard.bytes,
        "storage": shard.storage,
        "data_wait_share": outcome.data_wait_share,
        "dropped": shard.dropped,
        "host": world.host,
        "device": world.device,
        "threads": world.threads,
        "seconds": seconds,
        **peaks(world.device),
    }


def _weigh_classes(shard: Shard, weights: Sequence[float] | str | None, peers: Sequence[Mapping[str, Any]]) -> None:
    """Makes each row count for its class: by given weights, or such that all classes count the same over the peers."""
    if isinstance(weights, str):
        weights = balanced([sum(of_class) for of_class in zip(*(peer["classes"] for peer in peers), strict=True)])
    if weights is not None:
        shard.weigh_classes(weights)


def _on_one_kind(world: World, peers: Sequence[Mapping[str, Any]], client: Client) -> World:
    """Returns this rank's place on a device that all ranks have: the CPU, if one found no accelerator for itself.

    Ranks on different kinds of devices would open different process groups, and wait for each other.
    """
    kinds = {peer["device"].partition(":")[0] for peer in peers}  # this rank's torch may not know another's
    if len(kinds) == 1:
        return world
    if world.is_main:
        without = sorted({peer["host"] for peer in peers if peer["device"] == "cpu"})
        client.warn(
            f"all ranks train on the CPU: those on {', '.join(without)} have no {'/'.join(sorted(kinds - {'cpu'}))} "
            "device for each\n  -> give every executor its GPUs, or lower numWorkers; device='cpu' says it is meant"
        )
    return replace(world, device="cpu")


def _alone(world: World) -> World:
    """Returns the world as it is for a rank that trains by itself."""
    return replace(world, rank=0, world_size=1, local_rank=0)


def _best(outcomes: list[dict[str, Any]]) -> int:
    """Returns the rank with the smallest loss: of its validation, or of training where nothing is validated."""

    def loss(rank: int) -> float:
        record = outcomes[rank]["record"]
        value = float(record.get("val_loss", record["loss"]))
        return math.inf if math.isnan(value) else value

    return min(range(len(outcomes)), key=loss)


def _import_dynamo() -> None:
    gc.disable()  # as long as objects are made by the hundred thousand, and none thrown away
    try:
        importlib.import_module("torch._dynamo")
    finally:
        gc.enable()


def _imbalanced(counts: list[int], share: float) -> bool:
    """Whether the largest shard exceeds the mean by more than `share` and chance would allow.

    A split by hash leaves about `sqrt(mean)` of spread; four times that is never chance.
    """
    mean = sum(counts) / len(counts)
    return max(counts) > mean * (1 + share) + 4 * math.sqrt(mean)


class _Clock:
    """Splits the time since it was made into named laps, in seconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
