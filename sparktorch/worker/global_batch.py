"""A rank's rows, as users' loops get them: as parts of global batches, or as a data set of torch's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset

from sparktorch.base.batch import Batch
from sparktorch.base.no_op import no_op
from sparktorch.data.dataset.base import Shard
from sparktorch.train.recipe.loss import weigh

__all__ = ["GlobalBatch", "RankRows", "global_batch"]


@dataclass(frozen=True)
class GlobalBatch(Batch):
    """A rank's part of a global batch; unpacks into its inputs, followed by the label if there is one.

    Attributes:
        inputs: One tensor of shape `(rows, ...)` per input column, or per tensor of `preprocess`.
        label: Tensor of shape `(rows, ...)`, or `None`.
        weight: float32 sample weights of shape `(rows,)`; `None` means all ones.
        rows: Number of real rows. A rank without rows in a step gets a placeholder row of weight zero, because its
            peers wait for it in the all-reduce.
        step: Number of the step in its epoch, from 0.
    """

    step: int = 0
    _scale: float = 1.0
    _note: Callable[[torch.Tensor], None] = no_op

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.inputs
        if self.label is not None:
            yield self.label

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the mean loss of the global batch, a scalar tensor to call `backward` on.

        The mean of these values over the ranks is the loss of the whole batch, weighted by the sample weights, however
        its rows are distributed. So gradients that are averaged over the ranks, as DDP does, are those of that loss.

        Args:
            losses: A loss per row, of shape `(rows, ...)`; or their mean, if there are no sample weights.

        Raises:
            ModuleError: They are neither.
        """
        # A batch with fewer rows than batch normalisation needs was filled up: the rows that were added do not count.
        # In a batch without rows, the placeholder row counts, with weight zero.
        input_rows = len(self.inputs[0])
        is_filled_up = 0 < self.rows < input_rows
        if is_filled_up and losses.dim() and len(losses) == input_rows:
            losses = losses[: self.rows]
        weight = self.weight[: self.rows] if is_filled_up and self.weight is not None else self.weight
        total = weigh(losses, self.rows or input_rows, weight, what="the loop", param="function") * self._scale
        self._note(total.detach())
        return total


def global_batch(batch: Batch, step: int, scale: float, note: Callable[[torch.Tensor], None]) -> GlobalBatch:
    """Returns a batch, with placeholder rows complete, whose losses are scaled and noted."""
    complete = replace(batch.complete(), rows=batch.rows)
    return GlobalBatch(**vars(complete), step=step, _scale=scale, _note=note)


class RankRows(Dataset[tuple[torch.Tensor, ...]]):
    """The training rows of one rank, by number: tuples of the inputs, then the label if there is one, then the weight.

    A list or slice of numbers gives tensors with a row for each.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __len__(self) -> int:
        return self._shard.rows

    def __getitem__(self, index: int | slice | Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Returns one row, or several.

        Raises:
            IndexError: There is no such row.
        """
        # Arrays of NumPy have `__index__`, too: they are numbers if they have no axes.
        if hasattr(index, "__index__") and getattr(index, "ndim", 0) == 0:
            return tuple(tensor[0] for tensor in self[[operator.index(index)]])
        assert not isinstance(index, int)
        every = range(len(self))
        rows = every[index] if isinstance(index, slice) else [every[operator.index(row)] for row in index]
        batch = self._shard.select(torch.tensor(list(rows), dtype=torch.int64))
        label_and_weight = [tensor for tensor in (batch.label, batch.weight) if tensor is not None]
        return (*batch.inputs, *label_and_weight)

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, ...]]:
        """Returns several rows, one tuple each, as `DataLoader` asks for a batch."""
        return list(zip(*(tensor.unbind() for tensor in self[indices]), strict=True))
