"""A rank's part of a global batch, as users' loops get it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from sparktorch.base.batch import Batch
from sparktorch.train.recipe.loss import weigh

__all__ = ["GlobalBatch", "global_batch"]


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
    _note: Callable[[torch.Tensor], None] = lambda loss: None

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
        shown = len(self.inputs[0])
        filled = 0 < self.rows < shown
        if filled and losses.dim() and len(losses) == shown:
            losses = losses[: self.rows]
        weight = self.weight[: self.rows] if filled and self.weight is not None else self.weight
        total = weigh(losses, self.rows or shown, weight, what="the loop", param="function") * self._scale
        self._note(total.detach())
        return total


def global_batch(batch: Batch, step: int, scale: float, note: Callable[[torch.Tensor], None]) -> GlobalBatch:
    """Returns a batch, with placeholder rows complete, whose losses are scaled and noted."""
    whole = replace(batch.complete(), rows=batch.rows)
    return GlobalBatch(**vars(whole), step=step, _scale=scale, _note=note)
