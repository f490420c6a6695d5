"""Local SGD: every rank trains its own copy of the model, and the copies are averaged every few steps.

Stich 2018, Local SGD Converges Fast and Communicates Little (https://arxiv.org/abs/1805.09767);
post-local SGD, which begins with synchronous steps: Lin et al. 2018 (https://arxiv.org/abs/1808.07217).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.config import at_least
from sparktorch.errors import ConfigError
from sparktorch.train.strategies.base import GradientsOfRows, GradientSync, Job, Kind, Start, Strategy, broadcast

__all__ = ["KIND", "LocalSGD", "LocalSGDOptions"]


@dataclass(frozen=True, kw_only=True)
class LocalSGDOptions:
    """Options of `localSGD`.

    Attributes:
        period: Steps between two averagings of the models.
        start_step: Number of first steps in which gradients are averaged, as under `ddp`.
    """

    period: int = 4
    start_step: int = 0

    def __post_init__(self) -> None:
        at_least("strategyParams.period", self.period, 1)
        at_least("strategyParams.start_step", self.start_step, 0)


class LocalSGD(Strategy[LocalSGDOptions]):
    """Each rank's gradient is that of its own rows; parameters and buffers are averaged every few steps.

    A rank's loss is scaled so that the mean of all ranks' gradients is the gradient of the whole
    batch, however its rows are distributed. Each rank has its own optimizer state.
    """

    _steps = 0

    def prepare(self, module: nn.Module, start: Start) -> nn.Module:
        """Moves the module to the device, and broadcasts rank 0's parameters and buffers."""
        module.to(self._device)
        broadcast([*module.parameters(), *module.buffers()], self._world)
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return module

    def gradients(self, module: nn.Module) -> GradientSync:
        """Returns what averages gradients over the ranks in the first `start_step` steps."""
        return _FirstSteps(module, self._world.world_size, self._options.start_step)

    def after_step(self, module: nn.Module) -> None:
        """Averages the models at the end of each period."""
        self._steps += 1
        apart = self._steps - self._options.start_step
        if not self._alone and apart > 0 and apart % self._options.period == 0:
            _average(self._averaged(module))

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """Context in which every rank holds the mean of all models; afterwards, each has its own model again."""
        if self._alone:
            yield module
            return
        tensors = self._averaged(module)
        of_this_rank = [tensor.detach().clone() for tensor in tensors]
        _average(tensors)
        try:
            yield module
        finally:
            with torch.no_grad():
                for tensor, before in zip(tensors, of_this_rank, strict=True):
                    tensor.copy_(before)

    def state_dict(
        self, module: nn.Module, *, copy: bool = False, leave_out: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Returns a copy of the state dict of the mean of all models in rank 0, an empty dict in other ranks."""
        return super().state_dict(module, copy=True, leave_out=leave_out)

    def _averaged(self, module: nn.Module) -> list[torch.Tensor]:
        """Returns the tensors that training changes: floating-point and complex (as real views), no integer counters.

        A parameter that a callback freezes stays among them: until then, each rank has trained its own.
        """
        tensors = [tensor.detach() for tensor in [*self._trained, *module.buffers()]]
        real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
        return [tensor for tensor in real if tensor.is_floating_point()]


class _FirstSteps(GradientsOfRows):
    """Averages gradients over the ranks in the first steps; later, those of placeholders are zero anyway."""

    completes = True

    def __init__(self, module: nn.Module, ranks: int, steps: int) -> None:
        super().__init__(module, ranks)
        self._left, self.discards = steps, steps > 0

    def complete(self) -> None:
        """Averages the gradients."""
        if self.discards and self.divisor > 1:
            _average_gradients([p for p in self._module.parameters() if p.requires_grad])
        self._left -= 1
        self.discards = self._left > 0


def _average_gradients(parameters: list[nn.Parameter]) -> None:
    """Replaces gradients by their means over all ranks; a parameter without a gradient in any rank keeps none."""
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32)
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
    gradients: list[Any] = []
    for parameter, has_any in zip(parameters, has_gradient.tolist(), strict=True):
        if has_any and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if has_any:
            gradients.append(parameter.grad)
    _average([torch.view_as_real(grad) if grad.is_complex() else grad for grad in gradients])


@torch.no_grad()
def _average(tensors: list[torch.Tensor]) -> None:
    """Replaces the tensors by their means over all ranks, in one all-reduce for each dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # The order of a set may differ between ranks.
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in same]).div_(dist.get_world_size())
        dist.all_reduce(flat)
        for tensor, mean in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(mean.view_as(tensor))


def _check_settings(job: Job) -> None:
    if job.config.sync_batch_norm:
        raise ConfigError(
            f"strategy {job.config.strategy!r} lets workers train alone, and syncBatchNorm joins them in every step",
            hint="leave syncBatchNorm out",
            param="syncBatchNorm",
            code="ST-STRATEGY",
        )


KIND = Kind(options=LocalSGDOptions, rank=LocalSGD, check_settings=_check_settings, resumable=False)
