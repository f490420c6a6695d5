"""Assigns the rows of a rank their positions in the order of all rows, and their class weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.data.dataset.base import Shard
from sparktorch.data.dataset.reader import balanced_weights
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.distributed.client import Client
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.train.strategies.registry import strategy_for
from sparktorch.worker.job import RankJob

__all__ = ["assign_positions"]


def assign_positions(
    shard: Shard, world: World, job: RankJob, peers: Sequence[Mapping[str, Any]], client: Client
) -> tuple[World, TrainConfig, SamplingPlan]:
    """Assigns this rank's rows their positions in the global order, and applies class weights.

    Returns:
        Three values: the world of the ranks that train one model together, in which an independent rank is alone; this
            rank's configuration; and its sampling plan.

    Raises:
        ColumnError: There are no rows to train on.
        ConfigError: Early stopping looks at validation rows, and no row is marked for validation.
    """
    config = job.config
    counts = [peer["rows"] for peer in peers]
    strategy, options = strategy_for(config.strategy, config.strategy_params)
    independent = strategy.own_batches
    _check_rows(job, peers, independent=independent)
    _check_validation(job, peers, independent=independent)
    team = world
    rows = sum(counts)
    first = sum(counts[: world.rank])
    if independent:
        # The rank trains a model by itself.
        team = replace(world, rank=0, world_size=1, local_rank=0)
        rows = counts[world.rank]
        first = 0
        # If the ranks train the models of different folds, the models differ in their rows only, not in their seeds.
        if not strategy.makes_validation(options):
            config = replace(config, seed=config.seed + world.rank)
    plan = SamplingPlan(
        rows=rows, batch_size=config.batch_size, seed=config.seed, shuffle=config.shuffle, block=config.shuffle_block
    )
    shard.schedule(first, plan, epochs=config.epochs)
    _weigh_classes(shard, config.class_weights, job.columns.classes or 0, None if independent else client)
    return team, config, plan


def _check_rows(job: RankJob, peers: Sequence[Mapping[str, Any]], *, independent: bool) -> None:
    """Raises if there are no training rows: in any rank, if each must have some, or in all of them."""
    counts = [peer["rows"] for peer in peers]
    has_enough = min(counts) > 0 if independent else sum(counts) > 0
    if has_enough:
        return
    groups = job.columns.groups
    validation = job.columns.validation
    hint = "is every row marked for validation?" if validation else "check the filter or the path they come from"
    if groups is not None and groups.window is not None:
        gaps = " without a gap" if any(peer["groups"]["gaps"] for peer in peers) else ""
        hint = f"no group has {groups.window.rows} rows{gaps}, those of a window, of which the last ones train"
    raise ColumnError(
        "there are no rows to train on" + (f" for rank {counts.index(0)}" if independent else ""),
        hint="set a smaller numWorkers" if sum(counts) else hint,
        code="ST-NO-ROWS",
    )


def _check_validation(job: RankJob, peers: Sequence[Mapping[str, Any]], *, independent: bool) -> None:
    """Raises if a metric of validation rows is needed, and none are marked: in any rank, or in all of them."""
    config = job.config
    validation = job.columns.validation
    if not config.needs_metric or validation is None:
        return
    marked = [peer["validation"] for peer in peers]
    has_enough = min(marked) > 0 if independent else sum(marked) > 0
    if has_enough:
        return
    param = "earlyStoppingMetric" if config.patience is None else "earlyStoppingPatience"
    rows = f"of rank {marked.index(0)}" if independent else "that take part"
    problem = "marks none"
    hint = "it is to be true in some rows"
    lacking = [peers[marked.index(0)]] if independent else peers
    window = None if job.columns.groups is None else job.columns.groups.window
    if window is not None and any(peer["groups"]["marked"] for peer in lacking):
        problem = "marks no window's whole horizon"
        hint = f"a window validates if all of its last {window.horizon} rows are marked: mark more of them"
    raise ConfigError(
        f"{param} looks at a metric of validation rows, and of the rows {rows} column {validation!r} {problem}",
        hint=f"{hint}; or leave {param} out",
        param=param,
        code="ST-NO-VALIDATION",
    )


def _weigh_classes(shard: Shard, weights: Sequence[float] | str | None, classes: int, client: Client | None) -> None:
    """Multiplies row weights by class weights; "balanced" gives all classes the same total weight over the ranks.

    `client` connects the ranks over which classes are balanced; `None` balances the classes of this rank alone.
    """
    if isinstance(weights, str):
        sums = shard.weight_by_class(classes)
        if client is not None:
            peers = client.agree("classes", {"sums": sums})
            sums = [sum(class_sums) for class_sums in zip(*(peer["sums"] for peer in peers), strict=True)]
        weights = balanced_weights(sums)
    shard.weigh_classes(weights)
