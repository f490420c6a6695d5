"""How ranks share the work, one strategy a file."""

from sparktorch.config import TrainConfig
from sparktorch.train.strategy.base import Strategy
from sparktorch.train.strategy.ddp import DDP
from sparktorch.train.strategy.zero import Zero1
from sparktorch.world import World

__all__ = ["DDP", "Strategy", "Zero1", "build_strategy"]

_STRATEGIES: dict[str, type[DDP]] = {"ddp": DDP, "zero1": Zero1}


def build_strategy(config: TrainConfig, world: World) -> Strategy:
    """Returns the strategy that the configuration names, for this rank."""
    return _STRATEGIES[config.strategy](world, unused_parameters=config.unused_parameters)
