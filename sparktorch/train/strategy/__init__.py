"""How ranks share the work, one strategy a file."""

from typing import Any

from sparktorch.config import TrainConfig, from_dict
from sparktorch.train.recipe import Recipe
from sparktorch.train.strategy.base import Layout, Strategy
from sparktorch.train.strategy.ddp import DDP
from sparktorch.train.strategy.parameter_server import ParameterServer
from sparktorch.train.strategy.zero import Zero1
from sparktorch.world import World

__all__ = [
    "DDP",
    "Layout",
    "ParameterServer",
    "Strategy",
    "Zero1",
    "build_strategy",
    "check_strategy",
    "strategy_options",
    "strategy_type",
]

_STRATEGIES: dict[str, type[Strategy[Any]]] = {"ddp": DDP, "zero1": Zero1, "parameterServer": ParameterServer}


def strategy_type(config: TrainConfig) -> type[Strategy[Any]]:
    """Returns the class of the strategy that the configuration names."""
    return _STRATEGIES[config.strategy]


def strategy_options(config: TrainConfig) -> Any:
    """Returns the strategy's options, checked.

    Raises:
        ConfigError: The strategy has no such option, or an option is out of range.
    """
    return from_dict(strategy_type(config).options_type, config.strategy_params, where="strategyParams")


def check_strategy(config: TrainConfig, recipe: Recipe) -> None:
    """Refuses options of the strategy that it does not have, and what it does not go with.

    Raises:
        ConfigError: Names the option or the Param.
    """
    strategy_options(config)
    strategy_type(config).check(config, recipe)


def build_strategy(config: TrainConfig, world: World) -> Strategy[Any]:
    """Returns the strategy that the configuration names, for this rank."""
    return strategy_type(config)(config, world, strategy_options(config))
