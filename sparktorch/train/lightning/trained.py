"""Which parameters of a LightningModule its optimizer trains."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from sparktorch.errors import ModuleError

__all__ = ["Trained"]


class Trained:
    """The parameters that were trainable when the ranks began, and those of them that the optimizer leaves out."""

    def __init__(self, module: nn.Module) -> None:
        """Takes the module before a strategy has wrapped it."""
        self._module = module
        self._names = self._trainable()
        self._left_out: list[nn.Parameter] = []

    def look(self, optimizers: Iterable[Optimizer]) -> None:
        """Looks again, at the start of an epoch: hooks may have changed the module and the optimizer's groups.

        Raises:
            ModuleError: A hook has made parameters trainable, whose gradients the ranks would not share.
        """
        if late := sorted(self._trainable() - self._names):
            raise ModuleError(
                f"{type(self._module).__qualname__} has set requires_grad of {late[0]} during the training",
                hint="set it in __init__, and a rate of 0 in the group of the optimizer that you will train later",
                param="module",
            )
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        used = {id(parameter) for group in groups for parameter in group["params"]}
        self._left_out = [each for each in self._module.parameters() if each.requires_grad and id(each) not in used]

    def drop_unused_gradients(self, optimizer: Optimizer) -> None:
        """Removes gradients that the optimizer neither uses nor sets to zero: they would add up, and be clipped."""
        if not self._left_out:
            return
        used = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in self._left_out:
            if id(parameter) not in used:  # a hook may have added some since
                parameter.grad = None

    def _trainable(self) -> set[str]:
        return {name for name, parameter in self._module.named_parameters() if parameter.requires_grad}
