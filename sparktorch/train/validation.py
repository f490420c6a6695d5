"""What the validation rows of all ranks say of a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparktorch.train.group import sum_over_ranks
from sparktorch.train.metrics import Metrics
from sparktorch.train.step import Means, Sums
from sparktorch.train.task import align, correct, predicted

if TYPE_CHECKING:
    from sparktorch.config import TrainConfig
    from sparktorch.train.loop import ShardLike
    from sparktorch.train.recipe import Loss
    from sparktorch.train.step import BatchLike
    from sparktorch.world import World

__all__ = ["Best", "Validation"]

_ROWS = 4096
_MOST_CLASSES = 100  # of a confusion matrix


class Validation:
    """Evaluates a module on the validation rows of all ranks; every rank calls it at the same place."""

    def __init__(
        self,
        shard: ShardLike,
        config: TrainConfig,
        world: World,
        *,
        forward: Callable[[nn.Module, BatchLike], Any],
        loss: Loss | None,
        step: Callable[[nn.Module, BatchLike], tuple[torch.Tensor, Sums]],
        metrics: Metrics,
        classes: int | None,
        in_step_for: int = 0,
    ) -> None:
        """Prepares the evaluation.

        Args:
            shard: This rank's rows.
            config: Says what the labels mean.
            world: This rank's place.
            forward: Calls a module.
            loss: The loss; `None` if the training step computes it.
            step: Calls the training step.
            metrics: What is computed besides.
            classes: Number of classes the labels index, `None` when labels are not classes.
            in_step_for: Call the module as often as a rank with so many rows does, for each call waits for
                those of the other ranks.
        """
        self._batches = math.ceil(in_step_for / _ROWS)
        self._shard, self._world, self._task = shard, world, config.task
        self._forward, self._loss, self._step, self._metrics = forward, loss, step, metrics
        self._shown = classes if classes is not None and classes <= _MOST_CLASSES else 0

    @torch.no_grad()
    def run(self, module: nn.Module) -> tuple[dict[str, float], torch.Tensor | None]:
        """Evaluates the module; sums and states, not means, travel between the ranks.

        Returns:
            The metrics, and the confusion matrix, int64 of shape `(classes, classes)`.
        """
        module.eval()
        totals, means = torch.zeros(4, dtype=torch.float64), Means()
        counts = torch.zeros(self._shown**2, dtype=torch.float64)
        for batch, output, label, loss in self._outputs(module, means):
            weight = torch.ones(batch.rows, device=self._world.device) if batch.weight is None else batch.weight
            totals[0] += float(loss)
            totals[1] += float((weight if batch.loss_weight is None else batch.loss_weight).sum())
            totals[2] += float(weight.sum())
            if self._task == "classification" and label is not None:
                totals[3] += float((correct(output, label) * weight).sum())
                if self._shown:
                    cells = label.long() * self._shown + predicted(output, label)
                    counts += torch.bincount(cells, minlength=len(counts)).cpu()
            self._metrics.update(output, label)
        summed = sum_over_ranks(torch.cat([totals, counts]), self._world)
        loss_sum, loss_weight_sum, weight_sum, right = summed[:4].tolist()
        found = {}
        if self._loss is None:
            found = {f"val_{name}": mean for name, mean in means.over_ranks(self._world).items()}
        found["val_loss"] = loss_sum / loss_weight_sum if loss_weight_sum else float("nan")
        if self._task == "classification":
            found["val_accuracy"] = right / weight_sum if weight_sum else float("nan")
        found |= {f"val_{name}": value for name, value in self._metrics.compute().items()}
        return found, summed[4:].long().view(self._shown, self._shown) if self._shown else None

    def _outputs(
        self, module: nn.Module, means: Means
    ) -> Iterator[tuple[BatchLike, Any, torch.Tensor | None, torch.Tensor]]:
        """Yields each batch of this rank with output and label as from `align`, and its loss."""
        for batch in self._shard.validation(_ROWS, batches=self._batches):
            output = self._forward(module, batch)
            if self._loss is None:  # without rows too, for it calls the module
                loss, sums = self._step(module, batch)
                means.add(sums)
            if not batch.rows:
                continue
            output, label = align(self._task, output, batch.label)
            if self._loss is not None:
                loss = self._loss(output, label, batch.loss_weight)
            yield batch, output, label, loss


class Best:
    """The weights of the validation with the smallest loss, and how many have come since without a smaller one."""

    def __init__(self, patience: int | None) -> None:
        """Takes the number of validations after which it is enough; `None` keeps no weights at all."""
        self._patience = patience
        self._loss = math.inf
        self._waited = 0
        self.state: dict[str, torch.Tensor] = {}

    @property
    def out_of_patience(self) -> bool:
        """Whether training should end."""
        return self._patience is not None and self._waited >= self._patience

    def offer(self, loss: float, state: Callable[[], dict[str, torch.Tensor]]) -> bool:
        """Returns whether the model would now have these weights: the best so far, or the last where none are kept.

        Args:
            loss: Of the validation.
            state: Returns a copy of the weights; called in all ranks or in none.
        """
        if self._patience is None:
            return True
        if not loss < self._loss:
            self._waited += 1
            return False
        self._loss, self._waited = loss, 0
        self.state = state()
        return True
