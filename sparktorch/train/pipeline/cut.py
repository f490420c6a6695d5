"""A module in stages: the units that its forward pass is the composition of, and which of them are in which stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.recipe.adapter import without_caches
from sparktorch.train.sharding.arguments import Arguments

__all__ = ["HOW", "Cut", "Outline", "Output", "Stage", "bare"]

HOW = (
    "give it a method that returns modules in the order of the forward pass, each of which takes what the one before "
    "returns:\n       def stages(self):\n           return [self.embedding, *self.layers, self.head]\n"
    "     or divide it with strategyParams.shard"
)
_PARAM = "strategyParams"
_PLAN = "base_model_pp_plan"  # Configurations of models may bring a plan by this name.


class Outline(nn.Module):
    """Names, shapes and dtypes of a module's tensors, without values."""

    def __init__(self, module: nn.Module) -> None:
        """Takes them of a module."""
        super().__init__()
        like = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()
        }  # Tied ones stay tied.
        self._named = [(name, like[id(p)]) for name, p in module.named_parameters(remove_duplicate=False)]
        self.state = {name: torch.empty_like(t, device="meta") for name, t in module.state_dict().items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters by all of their names."""
        yield from self._named


class Cut:
    """A module in stages: the unit that each starts with, and the stage of each parameter and buffer, by name."""

    def __init__(self, module: nn.Module, stages: int, split: Sequence[str]) -> None:
        """Cuts a module."""
        self._module = module
        self._units, self._run = _units_of(module)
        self.starts = self._named(split, stages) if split else self._balanced(stages)
        self.outline = Outline(module)
        owners: dict[int, set[int]] = defaultdict(set)
        for stage, part in self._parts():
            for tensor in (*part.parameters(), *part.buffers()):
                owners[id(tensor)].add(stage)
        for what, hint in _misplaced(module, owners, stages):
            raise ModuleError(what, hint=hint, param="module" if hint is HOW else _PARAM, code="ST-PIPELINE")
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self.stage_of = {name: min(owners[id(tensor)]) for name, tensor in named if id(tensor) in owners}

    def _parts(self) -> Iterator[tuple[int, nn.Module]]:
        """Yields the modules of all units, and the stage of each."""
        for stage, (first, last) in enumerate(pairwise([*self.starts, len(self._units)])):
            yield from ((stage, part) for unit in self._units[first:last] for part in unit)

    def stage(self, number: int) -> Stage:
        """Returns a stage."""
        parts = [part for stage, part in self._parts() if stage == number]
        return Stage(parts, self._run, is_first=number == 0, is_last=number == len(self.starts) - 1)

    def keep(self, stages: Collection[int]) -> None:
        """Leaves the module the tensors of these stages, and those of none."""
        inside = {below for stage, part in self._parts() if stage in stages for below in part.modules()}
        outside = {below for _, part in self._parts() for below in part.modules()} - inside
        tensors_inside = {id(t) for part in inside for t in (*part.parameters(), *part.buffers())}
        for part in self._module.modules():
            for name, tensor in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                if id(tensor) not in tensors_inside:
                    setattr(part, name, None)  # nn.RNNBase has them in a list, too, which this updates.
            if part in outside:
                for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
                    if id(buffer) not in tensors_inside:
                        setattr(part, name, None)
                vars(part).update({name: None for name, value in vars(part).items() if isinstance(value, torch.Tensor)})

    def aliases(self, stages: Iterable[Stage]) -> list[tuple[nn.Module, str, nn.Module, str]]:
        """Returns where the module has parameters of stages outside of their modules, and where these have them."""
        inside = [part for stage in stages for part in stage.modules()]
        holders = {id(p): (part, name) for part in inside for name, p in part.named_parameters(recurse=False)}
        outside = (part for part in self._module.modules() if part not in {*inside})
        return [
            (part, name, *holders[id(p)])
            for part in outside
            for name, p in part.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in holders
        ]

    def _balanced(self, stages: int) -> list[int]:
        """Returns where stages begin so that the largest has as few parameters as can be."""
        sizes = [sum(p.numel() for part in unit for p in part.parameters()) for unit in self._units]
        sums = [0, *accumulate(sizes)]
        beginnings = [number for number in range(1, len(sizes)) if sizes[number]]

        @cache
        def best(end: int, count: int) -> tuple[int, tuple[int, ...]]:
            """Returns the size of the largest of so many stages of the units before `end`, and where each begins."""
            if count == 1:
                return sums[end], (0,)
            cuts = []
            for last in beginnings:
                if last < end and sums[last]:
                    most, starts = best(last, count - 1)
                    cuts.append((max(most, sums[end] - sums[last]), (*starts, last)))
            return min(cuts, default=(sums[-1] + 1, ()))

        most, starts = best(len(sizes), stages)
        if most > sums[-1]:
            raise ConfigError(
                f"strategyParams.pipeline makes {stages} stages, and {type(self._module).__name__} has "
                f"{len(beginnings) + 1} units with parameters that one can begin with",
                hint="make fewer stages, or return smaller modules from stages()",
                param=_PARAM,
                code="ST-PIPELINE",
            )
        return list(starts)

    def _named(self, split: Sequence[str], stages: int) -> list[int]:
        """Returns the units that begin with the named layers."""
        modules = dict(self._module.named_modules(remove_duplicate=False))
        name_of = {part: name for name, part in reversed(modules.items())}
        units: dict[nn.Module | None, int] = {}
        for number, parts in reversed(list(enumerate(self._units))):
            for part in parts:
                # A module that `stages` has made has no name, and is known by its parts.
                units |= dict.fromkeys([part] if part in name_of else part.modules(), number)
        starts = [units.get(modules.get(name), -1) for name in split]
        if len(starts) == stages - 1 and starts == sorted({*starts}) and min(starts, default=1) > 0:
            return [0, *starts]
        firsts = (unit[0] for unit in self._units[1:])
        names = (next((name_of[p] for p in first.modules() if p in name_of), "a function") for first in firsts)
        raise ConfigError(
            f"strategyParams.split names {', '.join(map(repr, split))}, and the {stages} stages of "
            f"{type(self._module).__name__} begin, but for the first, with {stages - 1} of: {', '.join(names)}",
            hint="keep the order of the forward pass",
            param=_PARAM,
            code="ST-PIPELINE",
        )


def _misplaced(module: nn.Module, owners: Mapping[int, set[int]], stages: int) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the stages that parameters are in, and what to do about it."""
    for name, parameter in module.named_parameters():
        stages_of_it = sorted(owners.get(id(parameter), ()))
        if len(stages_of_it) > 1:
            hint = "untie it, name other layers in strategyParams.split, or use strategyParams.shard"
            yield f"parameter {name!r} is in stages {stages_of_it[0]} and {stages_of_it[1]} of the pipeline", hint
        if not stages_of_it:
            yield f"parameter {name!r} is in none of the stages", HOW
    trained = {stage for p in module.parameters() if p.requires_grad for stage in owners[id(p)]}
    for stage in set(range(stages)) - trained if trained else ():
        hint = "name other layers in strategyParams.split, make fewer stages, or use strategyParams.shard"
        yield f"stage {stage} of the pipeline has no parameter to train", hint


@dataclass(frozen=True)
class Output:
    """A tensor in what a module returns: its position among the tensors there."""

    position: int


class Stage(nn.Module):
    """Some of a module's units.

    Attributes:
        parts: The modules of these units.
        is_first: Whether the module's first unit is among them.
        is_last: Whether its last one is.
        arguments: The module's, of which `forward` gets the tensors by name.
        expected: Shape, dtype and gradients of what it returns; `None` where that is not known yet.
        returned: What it has returned last, with an `Output` for each tensor.
        autocast: Context of its forward pass.
    """

    arguments: Arguments

    def __init__(self, parts: Sequence[nn.Module], run: Callable[..., Any], *, is_first: bool, is_last: bool) -> None:
        """Takes its modules, and what computes with them; see `_units_of`."""
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.originals = tuple(parts)  # Activation checkpointing wraps those in `parts`.
        self.is_first, self.is_last, self._run = is_first, is_last, run
        self.expected: list[torch.Tensor] | None = None
        self.returned: Any = None
        self.autocast: AbstractContextManager[Any] = nullcontext()

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Computes with what the stage before has returned, and with the module's inputs."""
        args, kwargs = self.arguments.filled(inputs.values())
        # What a stage receives is a leaf, or a view of FSDP's, which nothing may change in place.
        values = [value.clone() if value.requires_grad else value for value in received]
        with self.autocast:
            leaves, spec = pytree.tree_flatten(self._run(self, values, args, kwargs))
        outputs: list[torch.Tensor] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[index] = Output(len(outputs))
                outputs.append(_to_send(leaf))
        sent = tuple(outputs)
        self.returned = pytree.tree_unflatten(leaves, spec)
        if self.expected is not None and list(map(_kind, sent)) != list(map(_kind, self.expected)):
            raise ModuleError(
                f"a stage of the pipeline returns {list(map(_kind, sent))}, which are shapes, dtypes and whether there "
                f"are gradients, and has returned {list(map(_kind, self.expected))}",
                hint="return the same for the same inputs, and freeze parameters before the training",
                param="module",
            )
        return sent


def _to_send(value: torch.Tensor) -> torch.Tensor:
    """Returns a value as it is sent: contiguous and no view, of which FSDP warns."""
    return value.clone(memory_format=torch.contiguous_format) if value._is_view() else value.contiguous()


def _kind(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.dtype, value.requires_grad


def _units_of(module: Any) -> tuple[Sequence[Sequence[nn.Module]], Callable[..., Any]]:
    """Returns the modules of each unit, in the order of the forward pass, and what computes some units.

    That gets the stage, what the one before has returned, and the module's arguments.
    """
    what = "cannot be cut into stages: it is no nn.Sequential, has no method stages(), and is no model of transformers "
    what += "with a pipeline plan"
    if callable(getattr(type(module), "stages", None)):
        parts = list(module.stages())
        if parts and all(isinstance(part, nn.Module) for part in parts):
            return [[part] for part in parts], _chained
        what = "has a method stages() that returns no list of modules"
        raise ModuleError(f"{type(module).__name__} {what}", hint=HOW, param="module", code="ST-PIPELINE")
    if type(module).forward is nn.Sequential.forward:
        return [[part] for part in _flat(module)], _chained
    base = getattr(module, "base_model", None) if hasattr(type(module), "base_model_prefix") else None
    plan = getattr(getattr(base, "config", None), _PLAN, None)
    if plan:
        without_caches(module)
        named = [getattr(base, name) for name in plan if getattr(base, name, None) is not None]
        index = next(index for index, part in enumerate(named) if isinstance(part, nn.ModuleList))
        (first, *layers), head = named[index], [part for part in module.children() if part is not base]
        ends = [*named[index + 1 :], *(head if module is not base else [])]
        units = [[*named[:index], first], *([layer] for layer in layers), ends]
        return units, _Within(module, base, units)
    raise ModuleError(f"{type(module).__name__} {what}", hint=HOW, param="module", code="ST-PIPELINE")


def _flat(module: nn.Module) -> list[nn.Module]:
    """Returns the parts of a sequence, and those of sequences within it; one that is there twice, twice."""
    parts: list[nn.Module] = []
    for part in module._modules.values():
        if part is not None:
            parts += _flat(part) if type(part) is nn.Sequential else [part]
    return parts


def _chained(stage: Stage, received: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls parts one after another, the first of a module with its arguments."""
    args, kwargs = (args, kwargs) if stage.is_first else (received, {})
    output: Any = args
    for part in stage.parts:
        output = part(*args, **kwargs)
        args, kwargs = output if isinstance(output, tuple) else (output,), {}
    return output


def bare(module: Any, forward: Callable[..., Any] | None = None) -> Any:
    """Returns a copy of a module with its attributes and methods, but without its tensors, parts and hooks."""
    copied = object.__new__(type(module))
    nn.Module.__init__(copied)
    vars(copied).update({name: value for name, value in vars(module).items() if name not in vars(copied)})
    copied.training = module.training
    if forward is not None:
        vars(copied)["forward"] = forward
    return copied


class _Within:
    """Units of a module that calls its layers in a loop: a stage runs the module's own code, without other layers.

    So masks and positions are computed in each stage, of the module's inputs. The code of a stage is `forward` of a
    copy in which parts of earlier stages return what the stage has received, and those of later ones what they get.
    """

    def __init__(self, module: Any, base: Any, units: Sequence[Sequence[nn.Module]]) -> None:
        """Takes the module, the part of it that has the loop, and the units."""
        self._module, self._base = module, base
        self._order = {part: number for number, part in enumerate(part for unit in units for part in unit)}
        self._views: dict[Stage, tuple[Any, Any]] = {}
        self._received: Any = None

    def __call__(
        self, stage: Stage, received: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if stage not in self._views:
            base = self._view(self._base, stage)
            self._views[stage] = base, base if self._module is self._base else self._view(self._module, stage, base)
        base, module = self._views[stage]
        base.training, module.training = self._base.training, self._module.training
        if not stage.is_first:
            (self._received,) = received
        output = (module if stage.is_last else base).forward(*args, **kwargs)
        self._received = None
        return output if stage.is_last else getattr(output, "last_hidden_state", output)

    def _view(self, owner: Any, stage: Stage, base: nn.Module | None = None) -> Any:
        """Returns a copy of a module that has the parts of a stage, and stubs for those of others."""
        now = dict(zip(stage.originals, stage.parts, strict=True))
        first = self._order[stage.originals[0]]

        def of_stage(part: nn.Module) -> nn.Module:
            if part is self._base and base is not None:
                return base
            if isinstance(part, nn.ModuleList) and self._order.keys() & {*part}:
                return nn.ModuleList(map(of_stage, part))
            if part in now or part not in self._order:
                return now.get(part, part)
            stub: nn.Module = bare(part, self._returns_received if self._order[part] < first else _returns_input)
            return stub

        view = bare(owner)
        for name, buffer in owner.named_buffers(recurse=False):
            view.register_buffer(name, buffer)
        for name, part in owner.named_children():
            view.add_module(name, of_stage(part))
        return view

    def _returns_received(self, *_: Any, **__: Any) -> Any:
        """The forward pass of a part of an earlier stage."""
        return self._received


def _returns_input(value: Any, *_: Any, **__: Any) -> Any:
    """The forward pass of a part of a later stage."""
    return value
