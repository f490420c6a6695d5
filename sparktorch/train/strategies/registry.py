"""The strategies by name. To add one, add a file beside this one, which ends with its `Kind`, and an entry here."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig, from_dict, one_of
from sparktorch.base.state_dict import check_returned
from sparktorch.base.world import World
from sparktorch.errors import ConfigError, ConflictError, ModuleError
from sparktorch.train.recipe.adapter import adapted_parts
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies import ddp, fsdp, independent, local_sgd, mesh, pipeline_mesh
from sparktorch.train.strategies.base import Job, Kind, Strategy
from sparktorch.train.strategies.mesh_options import MeshOptions
from sparktorch.train.strategies.parameter_server import strategy as parameter_server

__all__ = [
    "STRATEGIES",
    "build_strategy",
    "check_device",
    "check_loop",
    "check_module",
    "check_strategy",
    "check_workers",
    "resumable",
    "strategy_for",
    "strategy_type",
    "workers_for",
]

STRATEGIES: dict[str, Kind] = {
    "ddp": ddp.KIND,
    "zero1": ddp.ZERO1,
    "zero2": fsdp.ZERO2,
    "zero3": fsdp.ZERO3,
    "mesh": mesh.MESH,
    "localSGD": local_sgd.KIND,
    "parameterServer": parameter_server.KIND,
    "independent": independent.KIND,
}


def strategy_type(name: str) -> Kind:
    """Returns what is known of a strategy; refuses unknown names with a `ConfigError`."""
    one_of("strategy", name, tuple(STRATEGIES))
    return STRATEGIES[name]


def strategy_for(name: str, params: Mapping[str, Any]) -> tuple[Kind, Any]:
    """Returns what is known of a strategy with these options, and the options.

    It refuses unknown ones and values out of range with a `ConfigError`.
    """
    kind = strategy_type(name)
    unknown = params.keys() - _names(kind)
    owners = [repr(owner) for owner, other in STRATEGIES.items() if unknown <= _names(other)]
    if unknown and owners:
        raise ConfigError(
            f"strategyParams.{min(unknown)} is no option of strategy {name!r}",
            hint=f"set strategy={' or '.join(owners)}, which has it, or leave it out",
            param="strategyParams",
            code="ST-UNKNOWN-NAME",
        )
    options = from_dict(kind.options, params, where="strategyParams")
    staged = isinstance(options, MeshOptions) and options.stacked > 1
    return pipeline_mesh.KIND if staged else kind, options


def _names(kind: Kind) -> set[str]:
    """Returns the names of a strategy's options."""
    return {option.name for option in fields(kind.options)}


def resumable() -> str:
    """Returns the names of the strategies that support checkpoints, as text for hints."""
    *names, last = (repr(name) for name, kind in STRATEGIES.items() if kind.resumable)
    return f"{', '.join(names)} or {last}"


def _job(config: TrainConfig, recipe: Recipe | None = None, **facts: Any) -> Job:
    """Returns a job with what else is known of it."""
    kind, options = strategy_for(config.strategy, config.strategy_params)
    return Job(config, recipe, options, kind, **facts)


def check_strategy(config: TrainConfig, recipe: Recipe) -> None:
    """Refuses unknown options of the strategy, and settings that it does not support, with a `ConfigError`."""
    job = _job(config, recipe)
    job.kind.check_settings(job)
    if config.model_folder and not job.kind.divides_parameters:
        raise ConfigError(
            f"modelDir is set, and under strategy {config.strategy!r} each worker holds the whole model",
            hint="set strategy='zero2', 'zero3' or 'mesh'; or leave modelDir out",
            param="modelDir",
            code="ST-MODEL-DIR",
        )


def check_workers(config: TrainConfig, workers: int) -> None:
    """Refuses options of the strategy that do not suit the number of workers with a `ConfigError`."""
    job = _job(config, workers=workers)
    job.kind.check(job)


def check_device(config: TrainConfig, device: str) -> None:
    """Refuses options of the strategy that do not suit the device of the workers with a `ConfigError`."""
    job = _job(config, device=device)
    job.kind.check_device(job)


def check_loop(config: TrainConfig) -> None:
    """Refuses strategies and options that do not suit a loop of the user's own with a `ConfigError`."""
    job = _job(config)
    if job.kind.own_batches:
        raise ConflictError(
            f"strategy {config.strategy!r} trains a model in each worker, and a function has a loop of its own",
            hint="leave strategy out, and do not wrap the module: then each worker trains its own",
            param="strategy",
        )
    if job.kind.runs_passes:
        raise ConflictError(
            "strategyParams.pipeline runs forward and backward passes itself, which a loop of your own does too",
            hint="use strategyParams.shard, or fit an estimator",
            param="strategyParams",
        )


def check_module(config: TrainConfig, recipe: Recipe, workers: int, module: nn.Module, batch: Batch) -> None:
    """Refuses modules and options of the strategy that do not suit each other with a `ModuleError` or `ConfigError`.

    `batch` has a few rows, with which the module can be called.
    """
    lazy = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None and workers > 1:
        raise ModuleError(
            f"parameter {lazy!r} gets its shape in the first forward pass, and ranks divide or compare them before",
            hint="name the sizes, such as nn.Linear(in_features, out_features) for nn.LazyLinear, or call the module "
            "once in a function that makes it",
            param="module",
            code="ST-LAZY",
        )
    if config.model_folder:
        check_returned(module)
    job = _job(config, recipe, workers=workers, module=module, batch=batch)
    job.kind.check(job)
    if config.model_folder and adapted_parts(module):
        raise ModuleError(
            "modelDir is set, and the module has adapters, whose base is not divided",
            hint="leave modelDir out: of adapters, only what is trained is sent",
            param="modelDir",
            code="ST-MODEL-DIR",
        )


def workers_for(config: TrainConfig, most: int, fewest: int) -> int | None:
    """Returns the largest number of workers, from `fewest` to `most`, that the strategy's options suit, if any does."""
    for workers in range(most, fewest - 1, -1):
        with suppress(ConfigError):
            check_workers(config, workers)
            return workers
    return None


def build_strategy(config: TrainConfig, world: World, *, in_users_loop: bool = False) -> Strategy[Any]:
    """Returns the strategy that the configuration names, for this rank; see `Strategy`."""
    check_device(config, world.device)
    kind, options = strategy_for(config.strategy, config.strategy_params)
    return kind.rank(config, world, options, in_users_loop=in_users_loop)
