"""Which parameters a training trains: those that require a gradient when it begins, and that its optimizer has."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from sparktorch.errors import ModuleError

__all__ = ["TrainedParameters"]


class TrainedParameters:
    """The parameters that were trainable when the ranks began, and those of them that the optimizer leaves out."""

    def __init__(self, module: nn.Module) -> None:
        """Takes the user's module after a strategy has prepared it."""
        self._module, self._left_out = module, list[nn.Parameter]()
        self._names = self._trainable()

    def look(self, optimizer: Optimizer) -> None:
        """Looks again, at the start of an epoch: hooks may have changed the module and the optimizer's groups.

        Hooks may freeze parameters. Others must not become trainable: no rank would get their gradients of others.
        """
        late = sorted(self._trainable() - self._names)
        if late:
            what = f"a hook has set requires_grad of {late[0]!r} during the training"
            hint = (
                "let it require a gradient from the beginning, in a group of the optimizer with a rate of 0 until then"
            )
            raise ModuleError(what, hint=hint, param="module")
        in_optimizer = _ids(optimizer)
        trainable = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._left_out = [parameter for parameter in trainable if id(parameter) not in in_optimizer]

    def drop_unused_gradients(self, optimizer: Optimizer) -> None:
        """Removes gradients that the optimizer neither uses nor sets to zero: they would add up, and be clipped."""
        if not self._left_out:
            return
        in_optimizer = _ids(optimizer)  # A hook may have added some to the optimizer since the last look.
        for parameter in self._left_out:
            if id(parameter) not in in_optimizer:
                parameter.grad = None

    def _trainable(self) -> set[str]:
        return {name for name, parameter in self._module.named_parameters() if parameter.requires_grad}


def _ids(optimizer: Optimizer) -> set[int]:
    """Returns the identities of the parameters in all groups of an optimizer."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
