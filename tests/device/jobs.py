"""Small trainings on a device, beside the same on the CPU, and what their steps may wait for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from sparktorch.base.config import StorageConfig, TrainConfig
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.device.kinds import KINDS, Net
from tests.support import ranks as on

__all__ = ["DEVICE", "close", "job_of", "trained", "waits_in_steps", "within"]

TOLERANCE = 1e-6 if on.DEVICE in ("cpu", "sim") else 1e-4  # the simulated device computes as the CPU does
REPORTS = -1  # as many as there may have been in the time of the training

DEVICE = "sim" if on.DEVICE == "cpu" else on.DEVICE

# What the loop does beside its steps.
BESIDE = (
    "__init__",
    "start",
    "begin_epoch",
    "epoch_record",
    "validate",
    "save",
    "epoch_done",
    "finish",
    "reproducible",
)

# What a rank may wait for while it takes steps: a part of the line; how often in a training of a few steps; why.
ALLOWED = {
    "mean = loss.item()": (REPORTS, "the report, every 0.2 s"),
    "first = int(smallest) < look_back < _look_back < count_step": (
        2,
        "losses that are not finite are looked for every 32 steps and at an epoch's end",
    ),
    "first = int(smallest) < look_back < _look_back < validate_within": (
        None,
        "and before a validation within an epoch",
    ),
    "module(*": (
        2,
        "DDP orders its buckets anew after its first backward pass, as one rank has seen them",
    ),
    "all(torch.equal(a[first:last].nan_to_num()": (
        8,
        "what a training step calls a pipeline with is compared once, in the last stage",
    ),
    "prepared.schedule.step(target=positions": (2, "stages of a pipeline meet before their first pass"),
    "dist.broadcast_object_list(forms": (8, "and tell each other the shapes that they pass on, once for each"),
    "counters.losses.sum().item()": (None, "before a validation within an epoch, so that its time is its own"),
    "backward()  # type": (None, "a simulated device's buckets come back from Gloo as the CPU's; NCCL's stay there"),
}


def job_of(
    kind: str = "dense",
    *,
    validated: bool = False,
    weighted: bool = False,
    storage: str = "memory",
    recipe: Mapping[str, Any] | None = None,
    **config: Any,
) -> TrainJob:
    """Returns a training of a few steps on a kind of column."""
    values: dict[str, Any] = {"task": "regression", "batch_size": 12, "epochs": 2, "seed": 3, **config}
    made: dict[str, Any] = {"module": Net, "module_params": {"kind": kind}, "loss": "MSELoss", **(recipe or {})}
    return TrainJob(
        columns=KINDS[kind].columns(validated=validated, weighted=weighted),
        recipe=Recipe(**made),
        config=TrainConfig(**values),
        max_imbalance=None,
        storage=StorageConfig(kind=storage, budget=1),  # type: ignore[arg-type]  # one of its names
    )


def trained(
    job: TrainJob, kind: str = "dense", *, ranks: int = 1, device: Any = DEVICE, **options: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Trains on the rows of a kind; returns the weights and every rank's meta."""
    return on.train_on(KINDS[kind].parts(ranks), job, device=device, **options)


def waits_in_steps(metas: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns what ranks waited for while they took steps and took rows for them, without what may be waited for."""
    return [wait for meta in metas for wait in _unexpected(meta["waits"], meta["seconds"]["train"])]


def _unexpected(waits: list[str], seconds: float) -> list[str]:
    found = [wait for wait in waits if within(wait, "train", "work") and not within(wait, *BESIDE)]
    for line, (most, _) in ALLOWED.items():
        times = int(seconds / 0.2) + 2 if most == REPORTS else most  # each of two epochs begins with one
        known = [wait for wait in found if line in wait][:times]
        for wait in known:
            found.remove(wait)
    return found


def within(wait: str, *functions: str) -> bool:
    """Whether one of these functions is among those that a wait was called from."""
    return bool(set(functions) & set(wait.split(" < ")[1:]))


def close(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    """Compares weights."""
    torch.testing.assert_close(dict(found), dict(expected), atol=tolerance, rtol=0)
