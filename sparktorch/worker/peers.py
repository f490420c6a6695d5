"""The facts that ranks exchange about their rows and devices, and what follows from these facts for all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparktorch.base.world import World
from sparktorch.data.columns import Groups
from sparktorch.data.dataset.base import Shard
from sparktorch.distributed.client import Client
from sparktorch.errors import counted

__all__ = ["fold_counts", "is_imbalanced", "meet", "on_one_device_type", "warn_of_groups"]


def meet(shard: Shard, world: World, client: Client, saved_by_position: bool | None) -> list[dict[str, Any]]:
    """Waits until all ranks have read their rows; returns facts about each rank's rows, in rank order."""
    return client.agree(
        "shard",
        {
            "rows": shard.rows,
            "validation": shard.validation_rows,
            "fingerprint": shard.fingerprint,
            "folds": fold_counts(shard),
            "device": world.device,
            "host": world.host,
            "saved_by_position": saved_by_position,
            "groups": shard.groups,
        },
    )


def fold_counts(shard: Shard) -> dict[str, tuple[int, int, int]]:
    """Returns `Folds.counts` with the folds as text, as keys in JSON are; empty without folds."""
    if shard.folds is None:
        return {}
    return {str(fold): counts for fold, counts in shard.folds.counts.items()}


def is_imbalanced(counts: Sequence[int], share: float) -> bool:
    """Returns whether the largest shard exceeds the mean by more than `share` and chance explain.

    The sizes of a split by hash have a standard deviation of about `sqrt(mean)`; four times that is never chance.
    """
    mean = sum(counts) / len(counts)
    return max(counts) > mean * (1 + share) + 4 * math.sqrt(mean)


def on_one_device_type(world: World, peers: Sequence[Mapping[str, Any]], client: Client) -> World:
    """Returns this rank's world; if the ranks have devices of different types, all ranks use the CPU.

    Otherwise, they would open different process groups, and wait for each other.
    """
    # Types are compared as texts, because this rank's torch may not know the type of another rank's device.
    types = {peer["device"].partition(":")[0] for peer in peers}
    if len(types) == 1:
        return world
    if world.is_main:
        without = sorted({peer["host"] for peer in peers if peer["device"] == "cpu"})
        client.warn(
            f"all ranks train on the CPU: those on {', '.join(without)} have no {'/'.join(sorted(types - {'cpu'}))} "
            "device for each\n  -> give every executor its GPUs, or lower numWorkers; device='cpu' says it is meant"
        )
    return replace(world, device="cpu")


def warn_of_groups(groups: Groups, peers: Sequence[Mapping[str, Any]], client: Client) -> None:
    """Warns if groups are too short for a window or have gaps, and if the ranks have too different shares."""
    facts = [peer["groups"] for peer in peers]
    count = sum(fact["groups"] for fact in facts)
    short = sum(fact["short"] for fact in facts)
    rows = sum(fact["rows"] for fact in facts)
    gaps = sum(fact["gaps"] for fact in facts)
    largest = max(fact["largest"] for fact in facts)
    idle = sum(not peer["rows"] for peer in peers)
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
    elif idle:
        client.warn(
            f"{idle} of {len(peers)} workers {'has' if idle == 1 else 'have'} nothing to train: a group goes to the "
            "worker of its hash, and there are few\n  -> set a smaller numWorkers"
        )
