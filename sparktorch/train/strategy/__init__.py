"""How ranks share the work, one strategy a file."""

from sparktorch.config import TrainConfig
from sparktorch.train.strategy.base import Strategy
from sparktorch.train.strategy.ddp import DDP
from sparktorch.world import World

__all__ = ["DDP", "Strategy", "build_strategy"]

_STRATEGIES = {"ddp": DDP}


def build_strategy(config: TrainConfig, world: World) -> Strategy:
    """Returns the strategy that the configuration names, for this rank."""
    return _STRATEGIES[config.strategy](world, unused_parameters=config.unused_parameters)
