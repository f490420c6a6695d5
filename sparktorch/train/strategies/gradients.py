"""How the gradients of a rank's backward passes become those of all ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import nn

__all__ = ["GradientSync", "GradientsOfRows"]


class GradientSync:
    """How the gradients of a rank's backward passes become those of all ranks. Here, they stay those of this rank.

    The engine calls in each step, as any of these may be a collective, in every rank at the same point:

    1. forward and `backward` of each micro-batch: all but the last within `no_sync`, the last within `reducing`. Or,
       where the device may be full: `before_trial`, all of them within `no_sync`, once or more often, and `reduce`;
    2. `complete`, before it looks at the gradients.

    Attributes:
        divisor: Number by which summed gradients are divided; the loop multiplies the loss by it.
        warm_up_passes: Forward and backward passes without a step, after which gradients are summed in their final
            order.
        completes: Whether `complete` changes gradients, so that an optimizer may not step without it.
    """

    warm_up_passes: ClassVar[int] = 0
    completes = False

    def __init__(self, divisor: int) -> None:
        """Takes the number of ranks with other rows."""
        self.divisor = divisor

    def backward(self, loss: torch.Tensor, *, rows: bool) -> None:
        """Runs the backward pass of a micro-batch; `rows` says whether it has any but placeholders."""
        loss.backward()  # type: ignore[no-untyped-call]

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which gradients are accumulated in this rank without reducing them."""
        return nullcontext()

    def reducing(self, *, rows: bool, warm_up: bool = False) -> AbstractContextManager[None]:
        """Returns a context of the last pass of a step, at whose end all gradients of the step are reduced.

        Args:
            rows: Whether this rank has rows in the step.
            warm_up: Whether no step follows, and gradients are zero.
        """
        return nullcontext()

    def before_trial(self) -> None:
        """Does the collectives that passes begin with, before passes that may find the device full."""

    def reduce(self, *, rows: bool = True) -> None:
        """Reduces the gradients that all passes of a step have accumulated within `no_sync`."""

    def complete(self) -> None:
        """Completes this rank's gradients after all passes of a step."""


class GradientsOfRows(GradientSync):
    """Gradients of a rank's own rows: none of placeholder rows.

    Their backward pass runs, for a module's own collectives. No row may use what placeholders do.

    Attributes:
        discards: Whether it is so in this step.
    """

    discards = True

    def __init__(self, module: nn.Module, divisor: int) -> None:
        """Takes the module that `prepare` returned."""
        super().__init__(divisor)
        self._module = module

    def backward(self, loss: torch.Tensor, *, rows: bool) -> None:
        """Runs the backward pass of a micro-batch."""
        super().backward(loss, rows=rows)
        if self.discards and not rows:
            self._module.zero_grad()
