"""No sharing at all: every rank trains a model of its own, and the best one is kept."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from torch import nn

from sparktorch.errors import ConfigError
from sparktorch.train.strategies.base import Job, Kind, Start, Strategy

__all__ = ["KIND"]


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

    def prepare(self, module: nn.Module, start: Start) -> nn.Module:
        """Returns the module on the rank's device, unwrapped."""
        return module.to(self._device)


def _check_settings(job: Job) -> None:
    if job.config.sync_batch_norm:
        raise ConfigError(
            f"strategy {job.config.strategy!r} trains a model for each worker, and syncBatchNorm joins them",
            hint="leave it out",
            param="syncBatchNorm",
            code="ST-STRATEGY",
        )


KIND = Kind(
    options=IndependentOptions,
    rank=Independent,
    check_settings=_check_settings,
    makes_validation=attrgetter("folds"),
    resumable=False,
    own_batches=True,
)
