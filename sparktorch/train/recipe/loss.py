"""What a step computes: batches and their parts, and the weighted sum of what is computed per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.devices import jagged
from sparktorch.base.world import World
from sparktorch.errors import ModuleError

__all__ = [
    "BatchLike",
    "Means",
    "StepBatch",
    "Sums",
    "TrainingStep",
    "cut",
    "full_precision",
    "micro_batches",
    "padding",
    "weigh",
]

Sums = Mapping[str, tuple[torch.Tensor, torch.Tensor | int]]  # weighted sums, and sums of weights


class BatchLike(Protocol):
    """One rank's part of a global batch; see `sparktorch.data.dataset.reader.Batch`."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Arguments of `forward`."""
        ...

    @property
    def label(self) -> torch.Tensor | None:
        """Labels."""
        ...

    @property
    def weight(self) -> torch.Tensor | None:
        """Sample weights; `None` means all ones."""
        ...

    @property
    def loss_weight(self) -> torch.Tensor | None:
        """What each row counts for in the loss: `weight` times the weight of its class."""
        ...

    @property
    def rows(self) -> int:
        """Number of real rows."""
        ...

    @property
    def lengths(self) -> Mapping[int, torch.Tensor]:
        """Number of elements of each row of padded, jagged and sparse inputs, by their places, on the CPU."""
        ...


@dataclass(frozen=True)
class StepBatch:
    """A batch, or a part of one, in one rank.

    Attributes:
        inputs: One tensor of shape `(rows, ...)` per input column.
        label: The labels, shape `(rows, ...)`, or `None`.
        weight: float32 sample weights of shape `(rows,)`; `None` means all ones.
        rows: Number of rows. A rank without rows in a step gets stand-ins of weight zero.
        loss_weight: What each row counts for in the loss.
        lengths: By the place of an input that is padded, jagged or sparse, number of elements of each row, int64 on
            the CPU. The mask of a padded one is the input after it.
    """

    inputs: tuple[torch.Tensor, ...]
    label: torch.Tensor | None
    weight: torch.Tensor | None
    rows: int
    loss_weight: torch.Tensor | None = None
    lengths: Mapping[int, torch.Tensor] = field(default_factory=dict)


def micro_batches(batch: BatchLike, parts: int, *, least: int) -> list[BatchLike]:
    """Splits a rank's part of a step.

    Args:
        batch: The rank's part of the step.
        parts: Into how many micro-batches. Those that get too few rows come last, with weight zero.
        least: The fewest rows of a micro-batch.
    """
    if parts == 1:
        return [batch]
    filled = min(parts, batch.rows // least)
    edges = [batch.rows * i // filled for i in range(filled + 1)] if filled else [0]
    found: list[BatchLike] = [_cut(batch, start, end) for start, end in pairwise(edges)] or [batch]
    if len(found) == parts:
        return found
    nothing = torch.zeros(least, device=batch.inputs[0].device)
    empty = replace(_cut(_complete(batch), 0, least), weight=nothing, loss_weight=nothing, rows=0)
    return [*found, *[empty] * (parts - len(found))]


def _cut(batch: BatchLike, start: int, end: int) -> StepBatch:
    def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[start:end]

    inputs = [cut(tensor, start, end, batch.lengths.get(place)) for place, tensor in enumerate(batch.inputs)]
    lengths = {place: counts[start:end] for place, counts in batch.lengths.items()}
    for place, longest in _longest(batch, lengths).items():  # of these rows, which may be less than that of all
        for both in (place, place + 1):
            inputs[both] = inputs[both][:, :longest]
    found = part(batch.label), part(batch.weight), end - start, part(batch.loss_weight)
    return StepBatch(tuple(inputs), *found, lengths)


def padding(batches: Sequence[BatchLike]) -> tuple[int, int]:
    """Returns how many places the padded inputs of some batches have, and how many of them hold an element."""
    places = elements = 0
    for batch in batches:
        for place, longest in _longest(batch, batch.lengths).items():
            places += longest * len(batch.lengths[place])
            elements += int(batch.lengths[place].sum())
    return places, elements


def _longest(batch: BatchLike, lengths: Mapping[int, torch.Tensor]) -> dict[int, int]:
    """Returns how wide a batch's padded inputs are, by place, if its rows have those lengths."""
    padded = {place: counts for place, counts in lengths.items() if batch.inputs[place].layout is torch.strided}
    return {place: max(1, int(counts.max())) if len(counts) else 1 for place, counts in padded.items()}


def cut(tensor: torch.Tensor, start: int, end: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Returns some rows of an input, which torch slices neither if it is jagged nor if it is sparse.

    Args:
        tensor: All rows.
        start: The first row.
        end: The row after the last.
        lengths: Of all rows of such an input, as in `BatchLike.lengths`; read from the tensor without them.
    """
    nested, sparse = tensor.is_nested, tensor.layout == torch.sparse_csr
    if not nested and not sparse:
        return tensor[start:end]
    ends: torch.Tensor = tensor.offsets() if nested else tensor.crow_indices()  # type: ignore[attr-defined]  # torch's nested
    counts = ends.diff().cpu() if lengths is None else lengths
    first = int(counts[:start].sum())
    last = first + int(counts[start:end].sum())
    own, values = ends[start : end + 1] - ends[start], tensor.values()[first:last]
    if nested:
        return jagged(values, own, counts[start:end])
    shape = (end - start, *tensor.shape[1:])
    return torch.sparse_csr_tensor(own, tensor.col_indices()[first:last], values, shape, check_invariants=False)


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

    def __init__(self, function: Callable[[nn.Module, StepBatch], Any]) -> None:
        """Takes a callable that returns a loss per row or their mean, or such a loss and a mapping of metrics."""
        self.name = str(getattr(function, "__qualname__", type(function).__qualname__))
        self._function = function

    def __call__(self, module: nn.Module, batch: BatchLike) -> tuple[torch.Tensor, Sums]:
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

    def per_row(self, module: nn.Module, batch: BatchLike) -> tuple[Any, Mapping[str, Any]]:
        """Returns the loss as the callable returned it, and its metrics."""
        found = self._function(module, _complete(batch))
        if not isinstance(found, tuple):
            return found, {}
        if len(found) == 2 and isinstance(found[1], Mapping):
            return found
        raise ModuleError(
            f"trainingStep {self.name} returned a tuple of {', '.join(type(item).__name__ for item in found)}",
            hint="return the loss, or the loss and a dict of metrics",
            param="trainingStep",
        )

    def _sums(self, name: str, value: Any, batch: BatchLike) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Returns the weighted sum of a metric and the sum of its weights; a scalar counts for all rows."""
        value = torch.as_tensor(value).detach().float()
        count = batch.rows if batch.weight is None else batch.weight.sum()
        if value.dim() == 0:
            return value * count, count
        what = f"metric {name!r} of trainingStep {self.name}"
        return weigh(_without_filler(value, batch), batch.rows, batch.weight, what=what, param="trainingStep"), count


def _complete(batch: BatchLike) -> StepBatch:
    """Returns a batch whose label and weight have as many rows as its inputs, which may be filled up."""
    shown, label, weight = len(batch.inputs[0]), batch.label, batch.weight
    if 0 < batch.rows < shown:
        missing = shown - batch.rows
        if label is not None:
            label = torch.cat([label, label[-1:].expand(missing, *label.shape[1:])])
        if weight is not None:
            weight = torch.cat([weight, weight.new_zeros(missing)])
    return StepBatch(batch.inputs, label, weight, shown, lengths=batch.lengths)


def _without_filler(values: torch.Tensor, batch: BatchLike) -> torch.Tensor:
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
