"""A rank's rows in the forms that users' loops get: parts of global batches, and a data set of torch."""

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
        its rows are distributed. So if gradients are averaged over the ranks, as DDP does, they are those of this loss.

        Args:
            losses: A loss per row, of shape `(rows, ...)`; or the mean of the rows' losses, if there are no sample
                weights.

        Raises:
            ModuleError: `losses` is neither of the two.
        """
        # A batch with fewer rows than batch normalisation needs was filled up: its added rows do not count. In a batch
        # without rows, the placeholder row counts, with weight zero.
        input_rows = len(self.inputs[0])
        is_filled_up = 0 < self.rows < input_rows
        if is_filled_up and losses.dim() and len(losses) == input_rows:
            losses = losses[: self.rows]
        weight = self.weight[: self.rows] if is_filled_up and self.weight is not None else self.weight
        total = weigh(losses, self.rows or input_rows, weight, what="the loop", param="function") * self._scale
        self._note(total.detach())
        return total


def global_batch(batch: Batch, step: int, scale: float, note: Callable[[torch.Tensor], None]) -> GlobalBatch:
    """Returns a batch for a user's loop, whose label and weights are as long as its inputs.

    `GlobalBatch.mean` multiplies losses by `scale`, and calls `note` with the result.
    """
    complete = replace(batch.complete(), rows=batch.rows)
    return GlobalBatch(**vars(complete), step=step, _scale=scale, _note=note)


class RankRows(Dataset[tuple[torch.Tensor, ...]]):
    """The training rows of one rank, by number.

    A row is a tuple of its inputs, its label and its weight; label and weight are left out if there are none. For a
    list or a slice of numbers, each tensor in the tuple has a row for each number.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __len__(self) -> int:
        return self._shard.rows

    def __getitem__(self, index: int | slice | Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Returns one row, or several rows.

        Raises:
            IndexError: There is no such row.
        """
        # Arrays of NumPy have `__index__`, too, but they are numbers only if they have no axes.
        is_number = hasattr(index, "__index__") and getattr(index, "ndim", 0) == 0
        if is_number:
            return tuple(tensor[0] for tensor in self[[operator.index(index)]])  # type: ignore[arg-type]
        assert not isinstance(index, int)
        all_rows = range(len(self))
        rows = all_rows[index] if isinstance(index, slice) else [all_rows[operator.index(row)] for row in index]
        batch = self._shard.select(torch.tensor(list(rows), dtype=torch.int64))
        label_and_weight = [tensor for tensor in (batch.label, batch.weight) if tensor is not None]
        return (*batch.inputs, *label_and_weight)

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, ...]]:
        """Returns several rows, one tuple each, as `DataLoader` asks for a batch."""
        return list(zip(*(tensor.unbind() for tensor in self[indices]), strict=True))
