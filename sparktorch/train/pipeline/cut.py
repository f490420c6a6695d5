"""Which units of a module are in which stage, and what a rank keeps of the module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.pipeline.stage import HOW, Stage, Units, units_of

__all__ = ["Cut", "Outline"]

_PARAM = "strategyParams"


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
        self.units: Units = units_of(module)
        self._module = module
        places = _places(self.units, styles)
        self.starts = _named(self.units, split, stages, places) if split else _balanced(self.units, stages, places)
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
        for stage, (first, last) in enumerate(pairwise([*self.starts, len(self.units.parts)])):
            yield from ((stage, part) for unit in self.units.parts[first:last] for part in unit)

    def stage(self, number: int) -> Stage:
        """Returns a stage."""
        first, last = [*self.starts, len(self.units.parts)][number : number + 2]
        return self.units.stage(first, last)

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


def _places(units: Units, styles: Mapping[str, str]) -> list[int]:
    """Returns the units that a stage may begin with: not between a "colwise" layer and its "rowwise" partner."""
    style_of = {units.module.get_submodule(name): style for name, style in styles.items()}
    found, opened = [], False
    for place, parts in enumerate(units.parts):
        if place and not opened:
            found.append(place)
        inside = {below for part in parts for below in part.modules()}
        styles_here = {style for part, style in style_of.items() if part in inside} & {"colwise", "rowwise"}
        opened = styles_here == {"colwise"} if styles_here else opened
    return found


def _balanced(units: Units, stages: int, places: Sequence[int]) -> list[int]:
    """Returns where stages begin so that the largest has as few parameters as can be."""
    sizes = [sum(p.numel() for part in unit for p in part.parameters()) for unit in units.parts]
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
            f"strategyParams.pipeline makes {stages} stages, and {type(units.module).__name__} has "
            f"{len(places) + 1} units with parameters that one can begin with",
            hint="make fewer stages, or return smaller modules from stages()",
            param=_PARAM,
            code="ST-PIPELINE",
        )
    return list(starts)


def _named(units: Units, split: Sequence[str], stages: int, places: Sequence[int]) -> list[int]:
    """Returns the units that begin with the named layers."""
    modules = dict(units.module.named_modules(remove_duplicate=False))
    known = {part: name for name, part in reversed(modules.items())}
    begins: dict[nn.Module | None, int] = {}
    for place, parts in reversed(list(enumerate(units.parts))):
        for part in parts:  # of one that `stages` has made, its parts
            begins |= dict.fromkeys([part] if part in known else part.modules(), place)
    found = [begins.get(modules.get(name), -1) for name in split]
    if len(found) == stages - 1 and found == [place for place in places if place in found]:
        return [0, *found]
    firsts = (units.parts[place][0] for place in places)
    shown = ", ".join(next((known[p] for p in first.modules() if p in known), "a function") for first in firsts)
    raise ConfigError(
        f"strategyParams.split names {', '.join(map(repr, split))}, and the {stages} stages of "
        f"{type(units.module).__name__} begin, but for the first, with {stages - 1} of: {shown}",
        hint="keep the order of the forward pass, and what tensor divides by 'colwise' with its 'rowwise' partner",
        param=_PARAM,
        code="ST-PIPELINE",
    )
