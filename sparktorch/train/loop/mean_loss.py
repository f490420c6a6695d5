"""Compares a loss that is one number for some rows with those of their halves, before a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch, RankDataset
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.distributed.process_group import max_over_ranks
from sparktorch.train.loop.engine import Engine
from sparktorch.train.numerics.determinism import untouched_generators
from sparktorch.train.recipe.loss import check_mean
from sparktorch.train.recipe.task import align, autocast, rows_of

__all__ = ["check_loss"]

_ROWS, _TOGETHER = 64, 8  # of a rank, and of a forward pass
_NUMBERS = (int, float, str, type(None))  # that a module counts in its passes
_STEPS = 64  # in which a rank looks for most rows


@torch.no_grad()
def check_loss(engine: Engine, config: TrainConfig, world: World, dataset: RankDataset) -> None:
    """Checks on a few rows that a loss which is one number is the mean of their losses; every rank calls it.

    The module is in evaluation mode. A loss that draws random numbers is not compared.
    """
    step, loss = engine.training_step, engine.loss
    if loss is not None and loss.rowwise:
        return
    given = config.micro_batch_size or config.batch_size // (world.world_size * config.accumulation_steps)
    size = 2 if given == "auto" else min(max(2, given), _TOGETHER)  # for which there is memory
    named = {"what": f"loss {loss.name}", "param": "loss"} if loss is not None else {}
    if step is not None:
        named = {"what": step.what, "param": step.param, "rowwise": step.rowwise}
    rough = step is not None and config.precision in ("bf16", "fp16")
    most = int(dataset.step_rows(0)[:_STEPS].argmax())
    with closing(dataset.epoch(0, first=most)) as batches:
        batch = next(batches).complete()
    groups, group = 1, 0
    eager = torch.compiler.set_stance("force_eager") if config.compile else nullcontext()
    evaluating = engine.strategy.evaluating(engine.module)
    with untouched_generators(torch.device(world.device)), engine.own.rehearsal(), evaluating as module, eager:
        buffers = [buffer.clone() for buffer in module.buffers()]
        stateful = [vars(each) for each in (*module.modules(), *([step] if step else [])) if hasattr(each, "__dict__")]
        numbers = [{name: value for name, value in of.items() if isinstance(value, _NUMBERS)} for of in stateful]
        engine.module.eval()
        while group < groups:
            first = group * size % batch.rows
            rows = batch.slice(first, min(first + size, batch.rows))
            losses = _losses(engine, config, module, rows)
            whole = next(losses)
            if group == 0:  # passes may be collectives, of which every rank takes as many
                scalar = isinstance(whole, torch.Tensor) and not whole.dim()
                groups = int(max_over_ranks(torch.tensor(-(-min(batch.rows, _ROWS) // size) * scalar), world))
            found = [whole, *losses] if groups else []
            if found and rows.rows > 1:
                check_mean(found, (rows.rows // 2, rows.rows - rows.rows // 2), **named, rough=rough)
            group += 1
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        for of, counted in zip(stateful, numbers, strict=True):
            of.update(counted)
    engine.training_mode()


def _losses(engine: Engine, config: TrainConfig, module: nn.Module, batch: Batch) -> Iterator[Any]:
    """Yields what the user's code computes for rows, twice, and for their halves; a loss on the same output."""
    strategy, step, half = engine.strategy, engine.training_step, batch.rows // 2
    spans = [(0, batch.rows), (0, batch.rows), (0, half or 1), (half, batch.rows)]
    if engine.loss is not None:
        output, label = align(config.task, engine.forward(module, strategy.together(batch)), batch.label)
        for start, end in spans:
            yield engine.loss.per_row(rows_of(output, start, end), None if label is None else label[start:end])
        return
    assert step is not None
    for start, end in spans:
        with autocast(batch.inputs[0].device, config.precision):
            loss, _ = step.per_row(strategy.shown(module), strategy.together(batch.slice(start, end)))
        yield loss
