"""The loss of a step: the weighted sum of what is computed per row, and weighted means of metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.world import World
from sparktorch.errors import ModuleError

__all__ = ["Means", "Sums", "TrainingStep", "full_precision", "weigh"]

Sums = Mapping[str, tuple[torch.Tensor, torch.Tensor | int]]  # weighted sums, and sums of weights


def full_precision(output: Any) -> Any:
    """Returns what a module returned under autocast in float32, for the loss."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.is_floating_point() else output
    if isinstance(output, Mapping):
        return {name: full_precision(tensor) for name, tensor in output.items()}
    return tuple(full_precision(tensor) for tensor in output)


def weigh(losses: Any, rows: int, weight: torch.Tensor | None, *, what: str, param: str) -> torch.Tensor:
    """Returns the weighted sum of the rows' losses, a scalar tensor.

    Args:
        losses: Shape `(rows, ...)`, or a scalar: their mean.
        rows: Number of rows.
        weight: float32 weights of shape `(rows,)`, or `None` for ones.
        what: Who computed the losses, for messages.
        param: The Param that named it.

    Raises:
        ModuleError: They are neither a scalar nor a value per row, or a scalar where rows have weights.
    """
    if not isinstance(losses, torch.Tensor):
        raise ModuleError(
            f"{what} returned {type(losses).__name__}, which is no tensor",
            hint="return one loss per row, shape (rows,), or their mean",
            param=param,
        )
    if losses.dim() == 0:
        if weight is None:
            return losses * rows
        if weight.any():
            raise ModuleError(
                f"{what} returns one number for the batch, so rows cannot be weighted",
                hint="return one loss per row: a tensor of shape (rows,)",
                param=param,
            )
        stand_in: torch.Tensor = losses * 0
        return stand_in
    if losses.shape[0] != rows:
        raise ModuleError(
            f"{what} returned shape {tuple(losses.shape)} for {rows} rows",
            hint="return one loss per row, shape (rows,), or their mean",
            param=param,
        )
    rowwise = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
    return rowwise.sum() if weight is None else (rowwise * weight).sum()


class TrainingStep:
    """The user's own forward pass and loss, a callable `(module, batch)`."""

    def __init__(self, function: Callable[[nn.Module, Batch], Any]) -> None:
        """Takes a callable that returns a loss per row or their mean, or such a loss and a mapping of metrics."""
        self.name = str(getattr(function, "__qualname__", type(function).__qualname__))
        self._function = function

    def __call__(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, Sums]:
        """Returns the weighted sum of the rows' losses, and those of the metrics.

        Raises:
            ModuleError: The callable returned something else than it should.
        """
        losses, metrics = self.per_row(module, batch)
        rows = batch.rows or len(batch.inputs[0])  # stand-ins are complete, and weigh nothing
        if isinstance(losses, torch.Tensor):
            losses = _without_filler(losses, batch).to(torch.promote_types(losses.dtype, torch.float32))
        total = weigh(losses, rows, batch.loss_weight, what=f"trainingStep {self.name}", param="trainingStep")
        if not batch.rows:
            return total, {}
        return total, {name: self._sums(name, value, batch) for name, value in metrics.items()}

    def per_row(self, module: nn.Module, batch: Batch) -> tuple[Any, Mapping[str, Any]]:
        """Returns the loss as the callable returned it, and its metrics."""
        found = self._function(module, batch.complete())
        if not isinstance(found, tuple):
            return found, {}
        if len(found) == 2 and isinstance(found[1], Mapping):
            return found
        raise ModuleError(
            f"trainingStep {self.name} returned a tuple of {', '.join(type(item).__name__ for item in found)}",
            hint="return the loss, or the loss and a dict of metrics",
            param="trainingStep",
        )

    def _sums(self, name: str, value: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Returns the weighted sum of a metric and the sum of its weights; a scalar counts for all rows."""
        value = torch.as_tensor(value).detach().float()
        count = batch.rows if batch.weight is None else batch.weight.sum()
        if value.dim() == 0:
            return value * count, count
        what = f"metric {name!r} of trainingStep {self.name}"
        return weigh(_without_filler(value, batch), batch.rows, batch.weight, what=what, param="trainingStep"), count


def _without_filler(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns what was computed of a batch without the rows that fill it up."""
    filled = 0 < batch.rows < len(batch.inputs[0])
    return values[: batch.rows] if filled and values.dim() and len(values) == len(batch.inputs[0]) else values


class Means:
    """Weighted means of named values over batches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, Any]] = {}

    def add(self, metrics: Sums) -> None:
        """Adds the sums of a batch."""
        for name, (value, weight) in metrics.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + _wide(value), before[1] + _wide(weight)

    def state_dict(self) -> dict[str, tuple[float, float]]:
        """Returns this rank's sums by name, for `load_state_dict`."""
        return {name: (float(value), float(weight)) for name, (value, weight) in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, tuple[float, float]]) -> None:
        """Adds such sums."""
        for name, (value, weight) in state.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + value, before[1] + weight

    def clear(self) -> None:
        """Starts anew."""
        self._sums = {}

    def over_ranks(self, world: World) -> dict[str, float]:
        """Returns each mean, over the rows for which its name was given; every rank calls it."""
        ours = self.state_dict()
        # Ranks may have met different names, so that tensors would not line up.
        every: list[Any] = [ours]
        if world.world_size > 1:
            every = [None] * world.world_size
            dist.all_gather_object(every, ours)
        names: Iterable[str] = dict.fromkeys(name for sums in every for name in sums)
        means = {}
        for name in names:
            value, weight = (sum(part) for part in zip(*(s[name] for s in every if name in s), strict=True))
            means[name] = value / weight if weight else math.nan
        return means


def _wide(value: torch.Tensor | int) -> torch.Tensor | int:
    return value.double() if isinstance(value, torch.Tensor) else value
