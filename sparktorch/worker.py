"""The body of a barrier task, without Spark: a rank's batches in, what it learned out.

Tests and GPU machines call `train_partition` directly.
"""

from __future__ import annotations

import gc
import importlib
import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pyarrow as pa
import torch

from sparktorch.config import TrainConfig
from sparktorch.data.columns import Columns
from sparktorch.data.plan import SamplingPlan
from sparktorch.data.shard import Shard, balanced
from sparktorch.errors import ColumnError
from sparktorch.train.group import process_group
from sparktorch.train.link import Link
from sparktorch.train.loop import train
from sparktorch.train.recipe import Recipe
from sparktorch.train.weights import pack_state
from sparktorch.world import World

__all__ = ["RankResult", "TrainJob", "train_partition"]

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Everything a rank needs besides its rows and its place.

    Attributes:
        columns: Which columns become which tensors.
        recipe: What is trained.
        config: How it is trained.
        max_imbalance: The largest share by which a rank's rows may exceed the mean before the
            ranks give up for a better split; `None` accepts any split.
        spare: Any one row of the training set, for a rank without rows to stand in with.
    """

    columns: Columns
    recipe: Recipe
    config: TrainConfig
    max_imbalance: float | None = 0.1
    spare: pa.RecordBatch | None = None


@dataclass
class RankResult:
    """What a rank hands back to the driver.

    Attributes:
        meta: JSON-ready facts: rows, times, and on rank 0 history, confusion matrix and fingerprint.
        payload: On rank 0 the model's state as a safetensors file; elsewhere empty.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


def train_partition(batches: Iterable[pa.RecordBatch], *, world: World, job: TrainJob, link: Link) -> RankResult:
    """Trains on one partition as one rank.

    The rows come before the communicator: every rank reads and checks its shard, the ranks agree
    over the link that all is well, and only then is the process group opened. A bad row is an
    error with a column, never a hang.

    Args:
        batches: The partition's record batches, under the wire names of `job.columns`.
        world: This rank's place.
        job: What to train and how.
        link: The line to the driver and to the other ranks.

    Raises:
        ColumnError: The rows cannot be trained on.
        PeerFailure: Another rank failed before training began.
        Cancelled: The driver cancelled the fit.
    """
    torch.set_num_threads(world.threads)
    if world.device.startswith("cuda"):
        torch.cuda.set_device(world.device)
    clock = _Clock()

    # The first optimizer of a process imports torch._dynamo, most of a second: meanwhile, rows arrive.
    threading.Thread(target=_import_dynamo, daemon=True).start()
    link.enter("loading")
    shard = Shard(batches, job.columns, spare=job.spare, device=world.device)
    clock.lap("load")

    link.enter("waiting for the other ranks")
    class_weights = job.config.class_weights
    peers = link.agree(
        "shard",
        {
            "rows": shard.rows,
            "validation": shard.validation_rows,
            "fingerprint": shard.fingerprint,
            "classes": shard.weight_by_class(job.columns.classes or 0) if class_weights == "balanced" else [],
        },
    )
    counts = [peer["rows"] for peer in peers]
    clock.lap("wait")
    if job.max_imbalance is not None and _imbalanced(counts, job.max_imbalance):
        return RankResult({"imbalanced": True, "rows": shard.rows})
    rows = sum(counts)
    if not rows:
        raise ColumnError("there are no rows to train on", hint="is every row marked for validation?")
    plan = SamplingPlan(
        rows=rows,
        batch_size=job.config.batch_size,
        seed=job.config.seed,
        shuffle=job.config.shuffle,
    )
    shard.place(sum(counts[: world.rank]), plan)
    if class_weights == "balanced":
        shard.weigh_classes(balanced([sum(sums) for sums in zip(*(peer["classes"] for peer in peers), strict=True)]))
    elif class_weights is not None:
        shard.weigh_classes(class_weights)

    with process_group(world, link.store, timeout=_COLLECTIVE_TIMEOUT):
        clock.lap("group")
        has_validation = any(peer["validation"] for peer in peers)
        outcome = train(
            shard,
            job.recipe,
            job.config,
            world,
            link,
            steps=plan.steps,
            has_validation=has_validation,
            classes=job.columns.classes,
        )
    clock.lap("train")
    meta: dict[str, Any] = {
        "rows": shard.rows,
        "validation_rows": shard.validation_rows,
        "bytes": shard.bytes,
        "host": world.host,
        "device": world.device,
        "threads": world.threads,
        "seconds": clock.laps,
    }
    if not world.is_main:
        return RankResult(meta)
    meta["history"] = outcome.history
    meta["confusion"] = outcome.confusion
    meta["steps_per_epoch"] = plan.steps
    meta["fingerprint"] = f"{sum(peer['fingerprint'] for peer in peers) % 2**64:016x}"
    return RankResult(meta, pack_state(outcome.state))


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
