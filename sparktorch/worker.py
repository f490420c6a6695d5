"""The body of a barrier task, without Spark: takes a rank's record batches and returns its `RankResult`.

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
    """Everything a rank needs besides its rows and its `World`.

    Attributes:
        columns: Which columns become which tensors.
        recipe: What is trained.
        config: How it is trained.
        max_imbalance: Largest share by which a rank's rows may exceed the mean. Above it, the ranks stop and ask for a
            better split; `None` accepts any split.
        checkpoint: Where and how often checkpoints are saved; `None` saves none.
        placeholder: One row of the training set, the placeholder row of ranks without rows.
        storage: Where a rank keeps its rows.
        by_key: Whether training orders rows by their row keys; otherwise by their position in the partitions.
        collective_seconds: Seconds that a rank waits for the others in a collective.
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
    """What a rank returns to the driver.

    Attributes:
        meta: JSON-ready values, such as rows and times in seconds. One rank (rank 0, or the best of independent ones)
            adds history, confusion matrix and fingerprint.
        payload: The model's state dict as safetensors bytes from that rank, empty from all others.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


def train_partition(batches: Iterable[pa.RecordBatch], *, world: World, job: TrainJob, client: Client) -> RankResult:
    """Trains on one partition as one rank.

    Every rank first reads and checks its shard. Once all ranks have confirmed this through the store, they open the
    process group. A bad row is therefore an error that names its column, never a hang.

    Args:
        batches: The partition's record batches, under the wire names of `job.columns`.
        world: This rank's place.
        job: What to train and how.
        client: Connects the rank to the driver and to the other ranks.

    Raises:
        ColumnError: The rows cannot be trained on.
        ClusterError: The rows do not fit on disk.
        PeerFailure: Another rank failed before training began.
        Cancelled: The driver cancelled the fit.
    """
    with _leaving_none_of(world.device):
        return _train(batches, world, job, client)


def _train(batches: Iterable[pa.RecordBatch], world: World, job: TrainJob, client: Client) -> RankResult:
    torch.set_num_threads(world.threads)
    clock = _Clock()
    forget_peaks("cpu")
    # The first optimizer of a process imports torch._dynamo, which takes most of a second: import it while rows arrive.
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
        if independent:  # the rank whose epochs count is only known at the end
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
        batches: Read to the end and ignored.
        world: This rank's place.
        client: Connects the rank to the driver.
        run: The dry run, called with `device`.
        config: The training's configuration, for hints on saving device memory.

    Raises:
        ClusterError: The device's memory is full.
    """
    for _ in batches:  # Spark does not reuse a worker that leaves input unread
        pass
    client.enter("trying the first row")
    select(world.device)
    with _leaving_none_of(world.device), explained(config):
        return RankResult(*run(device=world.device).packed())


@contextmanager
def _leaving_none_of(device: str) -> Iterator[None]:
    """Context that frees the device memory it has used: a reused Python worker would keep it from other processes."""
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
    """Clears the local variables in the tracebacks of an error and its causes, because the error lives on."""
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
    """Returns the storage for a rank's rows; on disk, it uses Spark's local directories."""
    if storage.kind == "memory":
        return InMemory()
    directory = local_directory(world.local_rank)
    return OnDisk(directory) if storage.kind == "disk" else WithinBudget(storage.budget * 10**6, directory)


def _meet(shard: Shard, world: World, job: TrainJob, client: Client) -> list[dict[str, Any]]:
    """Waits until all ranks have read their rows; returns facts about each rank's rows, in rank order."""
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
    """Gives this rank's rows their positions in the global order, and applies class weights.

    Returns:
        The world of the ranks that train one model together, in which an independent rank is alone; this rank's
        configuration; its sampling plan.

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
        if not strategy.makes_validation(options):  # folds differ only in their rows
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
    """Multiplies row weights by class weights; "balanced" gives all classes the same total weight over the peers."""
    if isinstance(weights, str):
        weights = balanced([sum(of_class) for of_class in zip(*(peer["classes"] for peer in peers), strict=True)])
    if weights is not None:
        shard.weigh_classes(weights)


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


def _alone(world: World) -> World:
    """Returns the world of a rank that trains by itself."""
    return replace(world, rank=0, world_size=1, local_rank=0)


def _best(outcomes: list[dict[str, Any]]) -> int:
    """Returns the rank with the smallest validation loss or, without validation, training loss."""

    def loss(rank: int) -> float:
        record = outcomes[rank]["record"]
        value = float(record.get("val_loss", record["loss"]))
        return math.inf if math.isnan(value) else value

    return min(range(len(outcomes)), key=loss)


def _import_dynamo() -> None:
    gc.disable()  # the import allocates hundreds of thousands of objects and frees none
    try:
        importlib.import_module("torch._dynamo")
    finally:
        gc.enable()


def _imbalanced(counts: list[int], share: float) -> bool:
    """Returns whether the largest shard exceeds the mean by more than `share` and chance explain.

    Sizes of a split by hash have a standard deviation of about `sqrt(mean)`; four times that is never chance.
    """
    mean = sum(counts) / len(counts)
    return max(counts) > mean * (1 + share) + 4 * math.sqrt(mean)


class _Clock:
    """Measures named laps, in seconds, from its creation on."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
