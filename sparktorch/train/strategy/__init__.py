"""How ranks share the work, one strategy a file."""

from typing import Any

from sparktorch.config import TrainConfig, from_dict
from sparktorch.train.recipe import Recipe
from sparktorch.train.strategy.base import Layout, Strategy
from sparktorch.train.strategy.ddp import DDP
from sparktorch.train.strategy.fsdp import Zero2, Zero3
from sparktorch.train.strategy.independent import Independent
from sparktorch.train.strategy.local_sgd import LocalSGD
from sparktorch.train.strategy.parameter_server import ParameterServer
from sparktorch.train.strategy.zero import Zero1
from sparktorch.world import World

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
