"""A module in stages: the units that its forward pass is the composition of, and which of them are in which stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from types import MappingProxyType
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
        }  # tied ones stay tied
        self._named = [(name, like[id(p)]) for name, p in module.named_parameters(remove_duplicate=False)]
        self.state = {name: torch.empty_like(t, device="meta") for name, t in module.state_dict().items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters by all of their names."""
        yield from self._named


class Cut:
    """A module in stages: the unit that each starts with, and the stage of each parameter and buffer, by name."""

    def __init__(
        self, module: nn.Module, stages: int, split: Sequence[str], styles: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Cuts a module."""
        self._module = module
        self._units, self._run = _units_of(module)
        places = self._places(styles)
        self.starts = self._named(split, stages, places) if split else self._balanced(stages, places)
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

    def keep(self, own: Collection[int]) -> None:
        """Leaves the module the tensors of these stages, and those of none."""
        inside = {below for stage, part in self._parts() if stage in own for below in part.modules()}
        outside = {below for _, part in self._parts() for below in part.modules()} - inside
        kept = {id(t) for part in inside for t in (*part.parameters(), *part.buffers())}
        for part in self._module.modules():
            for name, tensor in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                if id(tensor) not in kept:
                    setattr(part, name, None)  # nn.RNNBase has them in a list, too
            if part in outside:
                for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
                    if id(buffer) not in kept:
                        setattr(part, name, None)
                vars(part).update({name: None for name, value in vars(part).items() if isinstance(value, torch.Tensor)})

    def aliases(self, stages: Iterable[Stage]) -> list[tuple[nn.Module, str, nn.Module, str]]:
        """Returns where the module has parameters of stages outside of their modules, and where these have them."""
        inside = [part for stage in stages for part in stage.modules()]
        places = {id(p): (part, name) for part in inside for name, p in part.named_parameters(recurse=False)}
        outside = (part for part in self._module.modules() if part not in {*inside})
        return [
            (part, name, *places[id(p)])
            for part in outside
            for name, p in part.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in places
        ]

    def _places(self, styles: Mapping[str, str]) -> list[int]:
        """Returns the units that a stage may begin with: not between a "colwise" layer and its "rowwise" partner."""
        style_of = {self._module.get_submodule(name): style for name, style in styles.items()}
        found, opened = [], False
        for place, parts in enumerate(self._units):
            if place and not opened:
                found.append(place)
            inside = {below for part in parts for below in part.modules()}
            styles_here = {style for part, style in style_of.items() if part in inside} & {"colwise", "rowwise"}
            opened = styles_here == {"colwise"} if styles_here else opened
        return found

    def _balanced(self, stages: int, places: Sequence[int]) -> list[int]:
        """Returns where stages begin so that the largest has as few parameters as can be."""
        sizes = [sum(p.numel() for part in unit for p in part.parameters()) for unit in self._units]
        sums = [0, *accumulate(sizes)]
        places = [place for place in places if sizes[place]]

        @cache
        def best(end: int, count: int) -> tuple[int, tuple[int, ...]]:
            if count == 1:
                return sums[end], (0,)
            found = []
            for place in places:
                if place < end and sums[place]:
                    most, starts = best(place, count - 1)
                    found.append((max(most, sums[end] - sums[place]), (*starts, place)))
            return min(found, default=(sums[-1] + 1, ()))

        most, starts = best(len(sizes), stages)
        if most > sums[-1]:
            raise ConfigError(
                f"strategyParams.pipeline makes {stages} stages, and {type(self._module).__name__} has "
                f"{len(places) + 1} units with parameters that one can begin with",
                hint="make fewer stages, or return smaller modules from stages()",
                param=_PARAM,
                code="ST-PIPELINE",
            )
        return list(starts)

    def _named(self, split: Sequence[str], stages: int, places: Sequence[int]) -> list[int]:
        """Returns the units that begin with the named layers."""
        modules = dict(self._module.named_modules(remove_duplicate=False))
        known = {part: name for name, part in reversed(modules.items())}
        begins: dict[nn.Module | None, int] = {}
        for place, parts in reversed(list(enumerate(self._units))):
            for part in parts:  # of one that `stages` has made, its parts
                begins |= dict.fromkeys([part] if part in known else part.modules(), place)
        found = [begins.get(modules.get(name), -1) for name in split]
        if len(found) == stages - 1 and found == [place for place in places if place in found]:
            return [0, *found]
        firsts = (self._units[place][0] for place in places)
        shown = ", ".join(next((known[p] for p in first.modules() if p in known), "a function") for first in firsts)
        raise ConfigError(
            f"strategyParams.split names {', '.join(map(repr, split))}, and the {stages} stages of "
            f"{type(self._module).__name__} begin, but for the first, with {stages - 1} of: {shown}",
            hint="keep the order of the forward pass, and what tensor divides by 'colwise' with its 'rowwise' partner",
            param=_PARAM,
            code="ST-PIPELINE",
        )


def _misplaced(module: nn.Module, owners: Mapping[int, set[int]], stages: int) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the stages that parameters are in, and what to do about it."""
    for name, parameter in module.named_parameters():
        found = sorted(owners.get(id(parameter), ()))
        if len(found) > 1:
            hint = "untie it, name other layers in strategyParams.split, or use strategyParams.shard"
            yield f"parameter {name!r} is in stages {found[0]} and {found[1]} of the pipeline", hint
        if not found:
            yield f"parameter {name!r} is in none of the stages", HOW
    trained = {stage for p in module.parameters() if p.requires_grad for stage in owners[id(p)]}
    for stage in set(range(stages)) - trained if trained else ():
        hint = "name other layers in strategyParams.split, make fewer stages, or use strategyParams.shard"
        yield f"stage {stage} of the pipeline has no parameter to train", hint


@dataclass(frozen=True)
class Output:
    """A tensor in what a module returns: its place among the tensors there."""

    place: int


class Stage(nn.Module):
    """Some of a module's units.

    Attributes:
        parts: The modules of these units.
        is_first: Whether the module's first unit is among them.
        is_last: Whether its last one is.
        given: The module's arguments, of which `forward` gets the tensors by name.
        expected: Shape, dtype and gradients of what it returns; `None` where that is not known yet.
        returned: What it has returned last, with an `Output` for each tensor.
        autocast: Context of its forward pass.
    """

    given: Arguments

    def __init__(self, parts: Sequence[nn.Module], run: Callable[..., Any], *, is_first: bool, is_last: bool) -> None:
        """Takes its modules, and what computes with them; see `_units_of`."""
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.originals = tuple(parts)  # activation checkpointing wraps those in `parts`
        self.is_first, self.is_last, self._run = is_first, is_last, run
        self.expected: list[torch.Tensor] | None = None
        self.returned: Any = None
        self.autocast: AbstractContextManager[Any] = nullcontext()

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Computes with what the stage before has returned, and with the module's inputs."""
        args, kwargs = self.given.filled(inputs.values())
        # What a stage receives is a leaf, or a view of FSDP's, which nothing may change in place.
        values = [value.clone() if value.requires_grad else value for value in received]
        with self.autocast:
            found = self._run(self, values, args, kwargs)
        leaves, spec = pytree.tree_flatten(found)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        sent = tuple(map(_to_send, (leaves[place] for place in places)))
        for number, place in enumerate(places):
            leaves[place] = Output(number)
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
        found = list(module.stages())
        if found and all(isinstance(part, nn.Module) for part in found):
            return [[part] for part in found], _chained
        what = "has a method stages() that returns no list of modules"
        raise ModuleError(f"{type(module).__name__} {what}", hint=HOW, param="module", code="ST-PIPELINE")
    if type(module).forward is nn.Sequential.forward:
        return [[part] for part in _flat(module)], _chained
    base = getattr(module, "base_model", None) if hasattr(type(module), "base_model_prefix") else None
    plan = getattr(getattr(base, "config", None), _PLAN, None)
    if plan:
        without_caches(module)
        named = [part for name in plan if (part := getattr(base, name, None)) is not None]
        place = next(place for place, part in enumerate(named) if isinstance(part, nn.ModuleList))
        (first, *layers), head = named[place], [part for part in module.children() if part is not base]
        ends = [*named[place + 1 :], *(head if module is not base else [])]
        units = [[*named[:place], first], *([layer] for layer in layers), ends]
        return units, _Within(module, base, units)
    raise ModuleError(f"{type(module).__name__} {what}", hint=HOW, param="module", code="ST-PIPELINE")


def _flat(module: nn.Module) -> list[nn.Module]:
    """Returns the parts of a sequence, and those of sequences within it; one that is there twice, twice."""
    parts = [part for part in module._modules.values() if part is not None]
    return [each for part in parts for each in (_flat(part) if type(part) is nn.Sequential else [part])]


def _chained(stage: Stage, received: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls parts one after another, the first of a module with its arguments."""
    args, kwargs = (args, kwargs) if stage.is_first else (received, {})
    found: Any = args
    for part in stage.parts:
        found = part(*args, **kwargs)
        args, kwargs = found if isinstance(found, tuple) else (found,), {}
    return found


def bare(module: Any, forward: Callable[..., Any] | None = None) -> Any:
    """Returns a copy of a module with its attributes and methods, but without its tensors, parts and hooks."""
    made = object.__new__(type(module))
    nn.Module.__init__(made)
    vars(made).update({name: value for name, value in vars(module).items() if name not in vars(made)})
    made.training = module.training
    if forward is not None:
        vars(made)["forward"] = forward
    return made


class _Within:
    """Units of a module that calls its layers in a loop: a stage runs the module's own code, without other layers.

    So masks and positions are computed in each stage, of the module's inputs. The code of a stage is `forward` of a
    copy in which parts of earlier stages return what the stage has received, and those of later ones what they get.
    """

    def __init__(self, module: Any, base: Any, units: Sequence[Sequence[nn.Module]]) -> None:
        """Takes the module, the part of it that has the loop, and the units."""
        self._module, self._base = module, base
        self._order = {part: place for place, part in enumerate(part for unit in units for part in unit)}
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
        found = (module if stage.is_last else base).forward(*args, **kwargs)
        self._received = None
        return found if stage.is_last else getattr(found, "last_hidden_state", found)

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
            before = self._order[part] < first
            stub: nn.Module = bare(part, lambda found, *_, **__: self._received if before else found)
            return stub

        made = bare(owner)
        for name, buffer in owner.named_buffers(recurse=False):
            made.register_buffer(name, buffer)
        for name, part in owner.named_children():
            made.add_module(name, of_stage(part))
        return made
