"""ZeRO stage 1: data parallel, but every rank keeps the optimizer state for its share of the parameters only.

Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
(https://arxiv.org/abs/1910.02054), section 5.1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from sparktorch.base.devices import is_host
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies import ddp
from sparktorch.train.strategies.base import needs_optimizer_class

__all__ = ["KIND"]


class Zero1(ddp.DDP):
    """`ZeroRedundancyOptimizer` over `DistributedDataParallel`: each rank updates its share and broadcasts it."""

    def optimizer(self, recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer of this rank's share of the trainable parameters; a single rank's has all of them."""
        if self._alone:
            return recipe.build_optimizer(module)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        factory, parameters, options = recipe.optimizer_call(module)
        # A bucket per rank saves an accelerator one message per parameter. It needs a single dtype, and weights in the
        # contiguous memory format.
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
        bucket = not is_host(self._device) and len(dtypes) == 1 and not self._config.channels_last
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            parameters,
            optimizer_class=factory,
            parameters_as_bucket_view=bucket,
            **options,
        )
        return optimizer

    def saves(self, name: str) -> bool:
        """Every rank saves the state of its own share."""
        return super().saves(name) or name.startswith("optimizer.")


KIND = replace(ddp.KIND, rank=Zero1, refusals=(needs_optimizer_class("worker's share"), *ddp.KIND.refusals))
