"""What `fully_shard` is given: the units of a module, the options that choose them, and what it cannot divide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from sparktorch.base.config import at_least, one_of
from sparktorch.errors import ConfigError, ModuleError, nearest
from sparktorch.train.recipe.adapter import adapter_of
from sparktorch.train.recipe.recipe import Recipe

__all__ = [
    "DTYPES",
    "ShardingOptions",
    "check_checkpointing",
    "check_optimizer",
    "check_parameters",
    "check_parts",
    "recomputed",
    "units",
]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_OF_WHOLE_PARAMETERS = {"Adafactor", "Muon", "Rprop"}

_REPEATING = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Options of `zero2` and `zero3`; see `torch.distributed.fsdp.fully_shard`.

    Attributes:
        min_parameters: A block, or a submodule outside of blocks, with at least this many parameters is a unit: its
            parameters are gathered, and its gradients reduced, separately. The rest belongs to the unit of the whole
            module. Blocks are the layers that a model names (`_no_split_modules`), or else submodules
            of whose class a `ModuleList`, `ModuleDict` or `Sequential` has several. One that has most of its parameters
            in such submodules is a stage, whose blocks are units; experts belong to their block.
        wrap_classes: Class names of the submodules that are units, such as a transformer's layers; replaces blocks and
            `min_parameters`.
        activation_checkpointing: Whether blocks recompute their activations in backward instead of keeping them; of a
            module without blocks, the units.
        param_dtype: Dtype in which parameters are gathered and used; `None` keeps their own.
        reduce_dtype: Dtype in which gradients are reduced; `None` takes that of the parameters.
        cpu_offload: Whether a GPU rank keeps its shards of parameters, gradients and optimizer state in host memory.
    """

    min_parameters: int = 1_000_000
    wrap_classes: list[str] = field(default_factory=list)
    activation_checkpointing: bool = False
    param_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    reduce_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        at_least("strategyParams.min_parameters", self.min_parameters, 1)
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None:
                one_of(f"strategyParams.{name}", value, tuple(DTYPES))


def check_optimizer(recipe: Recipe, module: nn.Module) -> None:
    """Refuses optimizers that compute with whole parameters, of which ranks have parts, with a `ConfigError`."""
    if recipe.steps_itself:
        return
    optimizer = recipe.optimizer_call(module)[0]
    if isinstance(optimizer, type) and {kind.__name__ for kind in optimizer.__mro__} & _OF_WHOLE_PARAMETERS:
        raise ConfigError(
            f"optimizer {optimizer.__name__} computes with whole parameters, which this strategy divides",
            hint="choose another one, such as 'AdamW', or strategy='zero1'",
            param="optimizer",
            code="ST-OPTIMIZER",
        )


def check_parameters(module: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Refuses parameters that torch's `fully_shard` cannot divide with a `ModuleError`; `parts` are the units."""
    for what, instead in _undivided(module, parts):
        raise ModuleError(
            f"{what}: torch's fully_shard divides contiguous parameters of one dtype along their first axis",
            hint=f"{instead}, or use strategy='zero1' or 'ddp'",
            param="module",
            code="ST-SHARDING",
        )


def _undivided(module: nn.Module, parts: Sequence[nn.Module]) -> Iterator[tuple[str, str]]:
    """Yields what cannot be divided, and what to do about it."""
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            yield f"parameter {name!r} is a scalar", "make it a tensor of shape (1,)"
        elif not parameter.is_contiguous():
            yield f"parameter {name!r} is not contiguous", "leave its memory format as it is made"
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and (part.sparse or part.max_norm is not None):
            what = "sparse gradients" if part.sparse else "max_norm, which changes rows in a forward pass,"
            yield f"{name or 'the module'} has {what}", "leave sparse and max_norm out"
    taken: set[nn.Parameter] = set()
    for part in [*parts, module]:
        of_unit = {name: p for name, p in part.named_parameters() if p.requires_grad and p not in taken}
        taken |= set(of_unit.values())
        names = {p.dtype: name for name, p in of_unit.items()}
        if len(names) > 1:
            (one, first), (other, second), *_ = names.items()
            yield (
                f"{first!r} is of {one} and {second!r} of {other}, in one {type(part).__name__}",
                "make them of one dtype, or name parts of one dtype in strategyParams.wrap_classes",
            )


def check_parts(module: nn.Module, *, staged: bool) -> None:
    """Refuses parts that ranks which compute on the same rows cannot train as one process does with a `ModuleError`.

    `staged` says whether they have stages of the module, not parts of its layers.
    """
    for name, part in module.named_modules():
        obstacles = {
            "batch normalisation": isinstance(part, nn.modules.batchnorm._BatchNorm),
            "sparse gradients": isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse,
            "extra state": staged and type(part).get_extra_state is not nn.Module.get_extra_state,
            "adapters": adapter_of(part).has_frozen_base,
        }
        what = next((obstacle for obstacle, is_there in obstacles.items() if is_there), None)
        if what is not None:
            raise ModuleError(
                f"{name or 'the module'} has {what}, which ranks that compute on the same rows do not train as one "
                "process does",
                hint="normalise each row by itself, as nn.LayerNorm does; leave sparse=True out; or use "
                f"strategyParams.shard instead of {'pipeline' if staged else 'tensor'}",
                param="strategyParams",
                code="ST-PIPELINE" if staged else "ST-TENSOR-PARALLEL",
            )


def check_checkpointing(options: ShardingOptions, where: str, parts: Sequence[nn.Module]) -> None:
    """Refuses `activation_checkpointing` where none of the units of `where` would compute its activations again."""
    if options.activation_checkpointing and not parts:
        least = f"of min_parameters={options.min_parameters} or more"
        raise ConfigError(
            f"strategyParams.activation_checkpointing is set, and {where} has no part "
            f"{'of wrap_classes' if options.wrap_classes else least} that could compute its activations again",
            hint="set min_parameters lower, or name the classes of layers in wrap_classes; or leave it out",
            param="strategyParams",
        )


def recomputed(parts: Sequence[nn.Module], options: ShardingOptions, whole: nn.Module) -> list[nn.Module]:
    """Returns the units that compute their activations again; a layer beside the blocks of `whole` would save none."""
    if not options.activation_checkpointing:
        return []
    blocks = set() if options.wrap_classes else _blocks(whole)
    return [part for part in parts if part in blocks] or list(parts)


def units(module: nn.Module, options: ShardingOptions, whole: nn.Module | None = None) -> list[nn.Module]:
    """Returns the submodules that are units, inner ones first; refuses classes that the module lacks.

    `whole` is the module that `module` is a stage of, and has the blocks.
    """
    owners = Counter(p for part in module.modules() for p in part.parameters(recurse=False))
    if options.wrap_classes:
        present = {type(part).__name__ for part in module.modules()}
        for name in options.wrap_classes:
            if name not in present:
                raise ModuleError(
                    f"the module has no part of class {name!r}",
                    hint=nearest(name, present),
                    param="strategyParams",
                    code="ST-SHARDING",
                )
    blocks = set() if options.wrap_classes else _blocks(module if whole is None else whole)
    # A unit that reads the weights of its parts without calling them, and a block, are gathered at once.
    at_once = {part for part in module.modules() if isinstance(part, nn.MultiheadAttention)} | {
        block for block in blocks if all(owners[p] == 1 for p in block.parameters())
    }
    chosen: list[nn.Module] = []
    _visit(module, module, options, owners, at_once, chosen)
    return chosen


def _blocks(module: nn.Module) -> set[nn.Module]:
    """Returns the layers that a model says it is made of, or those of a class that a container repeats.

    Blocks may have blocks within. A stage, a tower or a member of an ensemble is repeated, and no block itself.
    """
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    named = {part for part in module.modules() if type(part).__name__ in names}
    if named:
        return named
    repeated = _repeated(module)
    return {part for part in repeated if not _is_stage(part, repeated)}


def _repeated(module: nn.Module) -> set[nn.Module]:
    """Returns the parts whose class their container, or that of another stage, has more than once."""
    containers = [part for part in module.modules() if isinstance(part, _REPEATING)]
    kinds = {container: Counter(type(part) for part in container.children()) for container in containers}
    # A stage may have one block, where another has nine.
    several = {kind for counts in kinds.values() for kind, count in counts.items() if count > 1} - {nn.Sequential}
    return {
        part
        for container in containers
        for part in container.children()
        if _has_forward(part) and (kinds[container][type(part)] > 1 or (type(part) in several and _has_parts(part)))
    }


def _is_stage(part: nn.Module, repeated: Collection[nn.Module]) -> bool:
    """Whether most parameters of a part are in repeated parts within, which have parts themselves.

    Experts do not count: a rank whose rows go to others does not call them, and would not gather their parameters.
    """
    inner = {
        parameter
        for name, within in part.named_modules()
        if within is not part and within in repeated and _has_parts(within) and not _is_expert(name, within)
        for parameter in within.parameters()
    }
    return bool(2 * sum(p.numel() for p in inner) > sum(p.numel() for p in part.parameters()))


def _is_expert(name: str, part: nn.Module) -> bool:
    return "expert" in f"{name} {type(part).__name__}".lower()


def _has_parts(part: nn.Module) -> bool:
    return next(part.children(), None) is not None


def _has_forward(part: nn.Module) -> bool:
    """Whether a part has a forward pass that could gather parameters; containers have none."""
    return type(part).forward is not nn.Module.forward or "forward" in vars(part)


def _visit(
    part: nn.Module,
    module: nn.Module,
    options: ShardingOptions,
    owners: Counter[nn.Parameter],
    at_once: Collection[nn.Module],
    chosen: list[nn.Module],
) -> tuple[int, bool]:
    """Appends the units of a part of the module; returns its number of parameters in no unit, and whether any is tied.

    Those of `at_once` have no units within.

    A function in `units` that calls itself would be a reference cycle, which keeps the whole parameters in device
    memory until the garbage collector finds it.
    """
    parameters = list(part.parameters(recurse=part in at_once))
    count, tied = sum(p.numel() for p in parameters), any(owners[p] > 1 for p in parameters)
    for child in () if part in at_once else part.children():
        below, tied_below = _visit(child, module, options, owners, at_once, chosen)
        count, tied = count + below, tied or tied_below
    fits = type(part).__name__ in options.wrap_classes if options.wrap_classes else count >= options.min_parameters
    # Tied parameters must be gathered with all submodules that share them: with the whole module.
    if fits and count and not tied and part is not module and _has_forward(part):
        chosen.append(part)
        count = 0
    return count, tied
