"""Stages of a pipeline, and their units: modules whose composition is a module's forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.errors import ModuleError
from sparktorch.train.huggingface.models import is_model, without_caches
from sparktorch.train.sharding.arguments import Arguments

__all__ = ["HOW", "Output", "Stage", "Units", "bare", "units_of"]

HOW = (
    "give it a method that returns modules in the order of the forward pass, each of which takes what the one before "
    "returns:\n       def stages(self):\n           return [self.embedding, *self.layers, self.head]\n"
    "     or divide it with strategyParams.shard"
)
_PLAN = "base_model_pp_plan"  # of configurations of transformers
_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)


@dataclass(frozen=True)
class Units:
    """The units of a module, in the order of its forward pass.

    Attributes:
        module: The module.
        parts: The modules of each unit.
        run: Computes some units: gets the stage, what the one before has returned, and the module's arguments.
    """

    module: nn.Module
    parts: Sequence[Sequence[nn.Module]]
    run: Callable[[Stage, Sequence[torch.Tensor], Sequence[Any], Mapping[str, Any]], Any]

    def stage(self, first: int, last: int) -> Stage:
        """Returns the stage of the units from `first` up to `last`."""
        parts = [part for unit in self.parts[first:last] for part in unit]
        return Stage(parts, self.run, is_first=first == 0, is_last=last == len(self.parts))


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
        """Takes its modules, and what computes with them; see `Units`."""
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


def units_of(module: Any) -> Units:
    """Returns the units of a module."""
    if callable(getattr(type(module), "stages", None)):
        found = list(module.stages())
        if found and all(isinstance(part, nn.Module) for part in found):
            return Units(module, [[part] for part in found], _chained)
        raise ModuleError(
            f"stages() of {type(module).__name__} returns no list of modules",
            hint=HOW,
            param="module",
            code="ST-PIPELINE",
        )
    if type(module).forward is nn.Sequential.forward:
        return Units(module, [[part] for part in _flat(module)], _chained)
    if isinstance(module, _STACKS):
        *layers, last = ([layer] for layer in module.layers)
        return _Within(module, module, [*layers, [*last, *([module.norm] if module.norm else [])]]).units()
    base = getattr(module, "base_model", None) if is_model(module) else None
    plan = getattr(getattr(base, "config", None), _PLAN, None)
    if plan:
        without_caches(module)
        named = [part for name in plan if (part := getattr(base, name, None)) is not None]
        place = next(place for place, part in enumerate(named) if isinstance(part, nn.ModuleList))
        (first, *layers), head = named[place], [part for part in module.children() if part is not base]
        ends = [*named[place + 1 :], *(head if module is not base else [])]
        return _Within(module, base, [[*named[:place], first], *([layer] for layer in layers), ends]).units()
    raise ModuleError(
        f"{type(module).__name__} cannot be cut into stages: it is no nn.Sequential, has no method stages(), and is no "
        "model of transformers with a pipeline plan",
        hint=HOW,
        param="module",
        code="ST-PIPELINE",
    )


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
        self._module, self._base, self._units = module, base, units
        self._order = {part: place for place, part in enumerate(part for unit in units for part in unit)}
        self._views: dict[Stage, tuple[Any, Any]] = {}
        self._received: Any = None

    def units(self) -> Units:
        """Returns the units."""
        return Units(self._module, self._units, self._run)

    def _run(
        self, stage: Stage, received: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if stage not in self._views:
            base = self._view(self._base, stage)
            self._views[stage] = base, base if self._module is self._base else self._view(self._module, stage, base)
        base, module = self._views[stage]
        base.training, module.training = self._base.training, self._module.training
        if not stage.is_first:
            (self._received,) = received
            if isinstance(base, _STACKS):  # which take values themselves
                bound = inspect.signature(base.forward).bind(*args, **kwargs)
                bound.arguments[next(iter(bound.arguments))] = self._received
                args, kwargs = bound.args, bound.kwargs
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
        if isinstance(owner, _STACKS):
            made.layers = nn.ModuleList(now[layer] for layer in owner.layers if layer in now)
            made.norm = None if owner.norm is None else now.get(owner.norm)
            return made
        for name, buffer in owner.named_buffers(recurse=False):
            made.register_buffer(name, buffer)
        for name, part in owner.named_children():
            made.add_module(name, of_stage(part))
        return made
