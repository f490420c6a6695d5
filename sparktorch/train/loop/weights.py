"""The weights that a training would return now: kept when they are the best, and returned or written at the end."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from sparktorch.base.config import TrainConfig
from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.base.world import World
from sparktorch.train.loop.engine import Engine
from sparktorch.train.loop.model_folder import ModelFolder
from sparktorch.train.numerics.ema import MovingAverage

__all__ = ["Weights"]


class Weights:
    """The weights of an engine's module, averaged if the training averages them, without a frozen base.

    With a folder for the model, a rank never has more than its share of them; otherwise rank 0 has all.
    """

    def __init__(self, engine: Engine, config: TrainConfig, world: World) -> None:
        """Takes the engine; checks that the ranks share the folder and can write it, if there is one."""
        self._engine = engine
        self.average: MovingAverage | None = None
        if config.ema_decay is not None:
            self.average = MovingAverage(engine.module.parameters(), config.ema_decay)
        self._folder = ModelFolder(config.model_folder, world) if config.model_folder else None
        if self._folder is not None:
            self._folder.check()

    def copied(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the weights on the CPU: rank 0's of all, or each rank's of its share. A collective."""
        if self._folder is None:
            return self._whole(copy=True)
        with self.averaged():
            return self._engine.strategy.shares(self._engine.module, copy=True)

    def result(self, best: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | WeightsFolder:
        """Returns the best weights, or the current ones if none were kept, or the folder that holds them now.

        `best` is what `copied` returned.
        """
        if self._folder is None:
            return self._whole(copy=False) if best is None else best
        engine = self._engine
        engine.optimizer.zero_grad()  # the gradients' memory is that of the files
        with self.averaged():
            return self._folder.write(engine.strategy.shares(engine.module) if best is None else best)

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the module has the weights that the training would return now."""
        return nullcontext() if self.average is None else self.average.swapped_in()

    def _whole(self, *, copy: bool) -> dict[str, torch.Tensor]:
        """Returns the model's state dict on the CPU; with a moving average, always a copy."""
        engine, base = self._engine, self._engine.base
        with self.averaged():
            state = engine.strategy.state_dict(
                engine.module, copy=copy or self.average is not None, leave_out=base.names if base else ()
            )
        return base.without(state) if base else state
