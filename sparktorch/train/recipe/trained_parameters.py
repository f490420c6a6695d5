"""The parameters that a training trains: they require a gradient when it begins, and its optimizer has them."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from sparktorch.errors import ModuleError

__all__ = ["TrainedParameters"]


class TrainedParameters:
    """The parameters that are trainable when the training begins, and those among them that the optimizer leaves out.

    `refresh` is called at the start of each epoch, and `drop_unused_gradients` in each step.
    """

    def __init__(self, module: nn.Module) -> None:
        """Takes the user's module after a strategy has prepared it."""
        self._module = module
        self._left_out: list[nn.Parameter] = []
        self._names = self._trainable_names()

    def refresh(self, optimizer: Optimizer) -> None:
        """Finds the parameters that the optimizer leaves out now: hooks may have changed the module and the groups.

        Hooks may freeze parameters. A parameter must not become trainable later, which is a `ModuleError`: the ranks
        would not exchange its gradients.
        """
        late_names = sorted(self._trainable_names() - self._names)
        if late_names:
            what = f"a hook has set requires_grad of {late_names[0]!r} during the training"
            hint = (
                "let it require a gradient from the beginning, in a group of the optimizer with a rate of 0 until then"
            )
            raise ModuleError(what, hint=hint, param="module")
        in_optimizer = _ids_in(optimizer)
        trainable = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._left_out = [parameter for parameter in trainable if id(parameter) not in in_optimizer]

    def drop_unused_gradients(self, optimizer: Optimizer) -> None:
        """Removes gradients that the optimizer neither uses nor sets to zero: they would add up, and be clipped."""
        if not self._left_out:
            return
        in_optimizer = _ids_in(optimizer)  # A hook may have added parameters to the optimizer since the last `refresh`.
        for parameter in self._left_out:
            if id(parameter) not in in_optimizer:
                parameter.grad = None

    def _trainable_names(self) -> set[str]:
        return {name for name, parameter in self._module.named_parameters() if parameter.requires_grad}


def _ids_in(optimizer: Optimizer) -> set[int]:
    """Returns the identities of the parameters in all groups of an optimizer."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
