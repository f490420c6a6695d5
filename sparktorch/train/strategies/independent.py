"""No sharing at all: every rank trains a model of its own, and the best one is kept."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from sparktorch.errors import Refusal
from sparktorch.train.strategies.base import Strategy

__all__ = ["Independent", "IndependentOptions"]


@dataclass(frozen=True, kw_only=True)
class IndependentOptions:
    """Options of `independent`.

    Attributes:
        folds: Whether every rank gets all rows, validates on its own part of them and trains on the
            rest, as in cross-validation; otherwise, a rank gets its own part only.
    """

    folds: bool = False


class Independent(Strategy[IndependentOptions]):
    """Uses the module unwrapped; `worker` runs each rank as if it were the only one."""

    resumable = False
    own_batches = True
    options_type = IndependentOptions
    refusals = (
        Refusal(
            "syncBatchNorm",
            lambda job: job.config.sync_batch_norm,
            "strategy 'independent' trains a model for each worker, and syncBatchNorm joins them",
            "leave it out",
        ),
    )

    @classmethod
    def makes_validation(cls, options: IndependentOptions) -> bool:
        """Whether each rank validates on its own part of the rows."""
        return options.folds

    def prepare(self, module: nn.Module) -> nn.Module:
        """Returns the module on the rank's device, unwrapped."""
        return module.to(self._device)
