"""How ranks share the work, one strategy a file."""

from typing import Any

from sparktorch.base.config import TrainConfig, from_dict
from sparktorch.base.world import World
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.base import Layout, Strategy
from sparktorch.train.strategies.ddp import DDP
from sparktorch.train.strategies.fsdp import Zero2, Zero3
from sparktorch.train.strategies.independent import Independent
from sparktorch.train.strategies.local_sgd import LocalSGD
from sparktorch.train.strategies.parameter_server.strategy import ParameterServer
from sparktorch.train.strategies.zero1 import Zero1

__all__ = [
    "DDP",
    "Independent",
    "Layout",
    "LocalSGD",
    "ParameterServer",
    "Strategy",
    "Zero1",
    "Zero2",
    "Zero3",
    "build_strategy",
    "check_strategy",
    "strategy_options",
    "strategy_type",
]

_STRATEGIES: dict[str, type[Strategy[Any]]] = {
    "ddp": DDP,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "localSGD": LocalSGD,
    "parameterServer": ParameterServer,
    "independent": Independent,
}


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
    """Refuses options that the strategy does not have, and what does not go together with it.

    Raises:
        ConfigError: Names the Params.
    """
    strategy_type(config).check(config, recipe, strategy_options(config))


def build_strategy(config: TrainConfig, world: World) -> Strategy[Any]:
    """Returns the strategy that the configuration names, for this rank."""
    return strategy_type(config)(config, world, strategy_options(config))
