"""An exponential moving average of the weights, swapped in for validation and for the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sparktorch.train.sharding.dtensor import local, sharded_like

__all__ = ["MovingAverage"]


class MovingAverage:
    """The average of a module's trainable parameters; for sharded parameters, the average of this rank's shards.

    It equals the average of `torch.optim.swa_utils.AveragedModel`: the weights after the first step, and from then on
    `decay * average + (1 - decay) * weights`. Buffers are not averaged.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        """Takes the parameters as the optimizer has them, and the decay of the average."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._averages: list[torch.Tensor] = []

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the weights; call it after each optimizer step."""
        weights = self._weights()
        if self._averages:
            self._update(self._averages, weights, 0)
        else:
            self._averages = [weight.clone() for weight in weights]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the module has the averages as its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def named_tensors(self, names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
        """Returns the averages by parameter name, without copying them, sharded like the parameters.

        Before the first `update`, it creates the averages from the weights.
        """
        if not self._averages:
            self._averages = [weight.clone() for weight in self._weights()]
        pairs = zip(self._parameters, self._averages, strict=True)
        return {names[parameter]: sharded_like(average, parameter) for parameter, average in pairs}

    def _weights(self) -> list[torch.Tensor]:
        """Returns this rank's part of each parameter: sharded parameters are `DTensor`s, others are whole."""
        return [local(parameter.detach()) for parameter in self._parameters]

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges the averages with the module's weights; before the first `update`, there is nothing to exchange."""
        if not self._averages:
            return
        for average, weight in zip(self._averages, self._weights(), strict=True):
            # Tensors are exchanged one after the other, so that memory holds a copy of one tensor only.
            weight_before = weight.clone()
            weight.copy_(average)
            average.copy_(weight_before)
