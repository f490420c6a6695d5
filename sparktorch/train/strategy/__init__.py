"""How ranks share the work, one strategy a file."""

from sparktorch.train.strategy.base import Strategy
from sparktorch.train.strategy.ddp import DDP
from sparktorch.world import World

__all__ = ["DDP", "Strategy", "build_strategy"]

_STRATEGIES = {"ddp": DDP}


def build_strategy(name: str, world: World) -> Strategy:
    """Returns the strategy with that name for this rank."""
    return _STRATEGIES[name](world)
