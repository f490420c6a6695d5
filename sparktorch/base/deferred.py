"""Modules without values: built on the device "meta", which takes no memory, and made real part by part.

As with torch's own deferred initialisation, each module sets the parameters and buffers that it has in
`reset_parameters`. It is called under a seed of the module's own, so that values are the same in whatever order.
"""

from __future__ import annotations

import hashlib
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparktorch.base.host_memory import trim
from sparktorch.base.state_dict import extra_states
from sparktorch.errors import ModuleError, refusing

__all__ = ["Deferred", "PartialWeights", "deferred"]

# torch remembers, from the first tensor that is made on a device by context, which functions make tensors. A library
# may replace one of them, such as linspace, while it loads a model.
with torch.device("meta"):
    torch.empty(0)

_SMALL = 1 << 20  # numbers that are drawn for a check


class PartialWeights(Mapping[str, torch.Tensor]):
    """Saved values, by name, of which a module may have more or fewer: what differs is logged and not refused."""

    @abstractmethod
    def log_differences(self, built: Deferred) -> None:
        """Logs which values the module has and these lack, and the reverse."""


class Deferred:
    """A module on the device "meta", whose parts `materialise` makes real.

    `saved` has values by name, in place of those of `reset_parameters`.
    """

    def __init__(self, module: nn.Module, saved: Mapping[str, torch.Tensor] | None = None, *, seed: int = 0) -> None:
        """Takes a module, saved values by name, and the seed of all others."""
        self.module, self.saved, self._seed = module, {} if saved is None else saved, seed
        self._kept = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._names: dict[int, list[str]] = {id(tensor): [] for _, tensor in self._kept}  # no other has the id of one
        for name, tensor in [*module.state_dict(keep_vars=True).items(), *self._kept]:  # hooks may have changed names
            if id(tensor) in self._names:
                self._names[id(tensor)].append(name)
        self._extra = {id(part): name for name, part in extra_states(module) if name in self.saved}
        self._blank = _copied(module, {})  # strategies change the module
        named = self._blank.named_modules()
        self._own = {path: [each for each in _tensors(part) if each[2].is_meta] for path, part in named}
        first = reversed(self._own.items())  # of those that have a tensor, the first counts
        self._owners = {id(tensor): path for path, own in first for _, _, tensor in own}
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for part in module.modules():
            for _, name, tensor in _tensors(part):
                self._places.setdefault(id(tensor), []).append((part, name))

    @torch.no_grad()
    def materialise(self, part: nn.Module) -> None:
        """Gives those tensors of a part that have none their values, on the CPU; tied ones stay tied.

        A `ModuleError` names one that is neither saved nor set by `reset_parameters`.
        """
        trim()  # what an earlier part has left, between the shards that were kept of it
        for below in part.modules():
            reset = cache(self._reset)
            for _, name, tensor in _tensors(below):
                saved = self._saved_as(id(tensor))  # also of a real tensor, as of a NumPy array
                if saved is None and not tensor.is_meta:
                    continue
                value = self.saved[saved].to(tensor.dtype) if saved else reset(self._owners[id(tensor)])[id(tensor)]
                made = _like(tensor, value)
                for place, called in [(below, name), *self._places.get(id(tensor), ())]:
                    if getattr(place, called, None) is tensor:
                        setattr(place, called, made)  # recurrent modules keep what is set in a list, too
            if (extra := self._extra.pop(id(below), None)) is not None:
                below.set_extra_state(self.saved[extra])

    @property
    def lacking(self) -> list[str]:
        """Names of a state dict that have no saved value."""
        wanted = self.module.state_dict(keep_vars=True)
        return [name for name, value in wanted.items() if name not in self.saved and not self._saved_as(id(value))]

    def check_saved(self) -> None:
        """Raises a `ModuleError` if names or shapes of saved values are not those of this module."""
        wanted, kind = self.module.state_dict(keep_vars=True), type(self.module).__qualname__
        wrong = [f"lack {name!r}, which {kind} has" for name in self.lacking]
        wrong += [f"have {name!r}, which {kind} has not" for name in sorted(self.saved.keys() - wanted.keys())]
        for name, tensor in wanted.items() if not wrong else ():
            if (saved := self._saved_as(id(tensor))) and (shape := self.saved[saved].shape) != tensor.shape:
                wrong.append(f"have {name!r} of the shape {tuple(shape)}, and that of {kind} has {tuple(tensor.shape)}")
        if wrong:
            hint = "they must be those of the same module, under its names"
            raise ModuleError(f"the saved weights {wrong[0]}", hint=hint, param="module")

    def check_reset(self) -> None:
        """Raises a `ModuleError` if no method sets what is not saved; of what is large, if there is no method."""
        for path, own in self._own.items():
            small = sum(each.numel() for _, _, each in own) < _SMALL
            if any(not self._saved_as(id(each)) for _, _, each in own) and (small or not self._resets(path)):
                self._reset(path)

    def _saved_as(self, key: int) -> str | None:
        """Returns the name under which a tensor is saved, which may have several."""
        return next((name for name in self._names.get(key, ()) if name in self.saved), None)

    @torch.no_grad()
    def _reset(self, path: str) -> dict[int, torch.Tensor]:
        """Returns the values that a module's tensors get when it is reset, by the `id` of what stands for them."""
        first = again = self._drawn(path, 0)
        if not all(_has_nan(value) for _, value in first.values()):
            again = self._drawn(path, 1)
        for key, (name, value) in first.items():
            # What has not been set is NaN, which is unlike itself, or what it was filled with, which differs.
            if not self._saved_as(key) and (value.is_meta or bool((value != again[key][1]).any())):
                kind, place = type(self._blank.get_submodule(path)).__qualname__, f"{path}.{name}".removeprefix(".")
                what = f"with modelDir, {place!r} has no value: no reset_parameters() sets it"
                hint = f"set it in a method reset_parameters() of {kind}, or of what it is in; or leave modelDir out"
                raise ModuleError(what, hint=hint, param="module")
        return {key: value for key, (_, value) in first.items()}

    def _drawn(self, path: str, fill: int) -> dict[int, tuple[str, torch.Tensor]]:
        """Fills a module's tensors with NaN, or `fill` if they are no floats, and resets it; all others stay "meta"."""
        part = self._blank.get_submodule(path)
        own = [each for each in self._own[path] if self._owners[id(each[2])] == path]
        seed = hashlib.sha256(f"{self._seed} {path}".encode()).digest()[:8]
        what = f"{path!r}, a {type(part).__qualname__}, cannot be reset"
        hint = "with modelDir, reset_parameters() may read tensors of its own module only"
        try:
            with refusing(what, hint, param="module"), torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(int.from_bytes(seed))
                for table, name, each in own:
                    filled = torch.empty_like(each, device="cpu").fill_(torch.nan if _has_nan(each) else fill)
                    table[name] = _like(each, filled)
                for reset in self._resets(path):
                    reset()
                return {id(each): (name, table[name].detach()) for table, name, each in own}
        finally:
            for table, name, each in chain.from_iterable(self._own.values()):  # a method may set those of other modules
                table[name] = each

    def _resets(self, path: str) -> list[Callable[[], Any]]:
        """Returns what sets a module's tensors: its own method and then those above it, as `Module.apply` would."""
        parts = [self._blank]
        for name in filter(None, path.split(".")):
            parts.insert(0, parts[0].get_submodule(name))
        found = [getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None)) for part in parts]
        for number, part in enumerate(parts):  # of the nearest model that sets the values of its parts
            inits = filter(callable, (getattr(above, "_init_weights", None) for above in parts[number:]))
            init = next((each for each in inits if len(inspect.signature(each).parameters) == 1), None)
            found.append(init and partial(init, part))
        return [each for each in found if callable(each)]


def deferred(
    make: Callable[[], nn.Module],
    saved: Mapping[str, torch.Tensor] | Callable[[nn.Module], Mapping[str, torch.Tensor]] | None = None,
    *,
    seed: int = 0,
) -> Deferred:
    """Calls a module's factory on the device "meta"; `saved` may be a function of the module."""
    with torch.device("meta"), _Copies() as copies:  # type: ignore[no-untyped-call]
        module = make()
    if copies.lost and not hasattr(module, "_init_weights"):  # which sets again what such models copy
        raise ModuleError(
            f"the constructor of {type(module).__qualname__} copies values into tensors, as load_state_dict does, "
            "and is called without values",
            hint="set them in reset_parameters(), give a folder of weights as module, or leave modelDir out",
            param="module",
        )
    return Deferred(module, saved(module) if callable(saved) else saved, seed=seed)


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether values are copied into tensors without values, where they are lost."""

    lost = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.lost |= func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta
        return func(*args, **(kwargs or {}))


def _copied(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Returns a module of the same classes and tensors, which may be set there; those with values are copies."""
    if id(module) not in made:
        made[id(module)] = copied = object.__new__(type(module))
        vars(copied).update(vars(module))
        for kind in ("_parameters", "_buffers"):
            own = vars(module)[kind].items()
            vars(copied)[kind] = {name: each if each is None or each.is_meta else each.clone() for name, each in own}
        parts = module._modules.items()
        vars(copied)["_modules"] = {name: None if part is None else _copied(part, made) for name, part in parts}
    return made[id(module)]


def _tensors(part: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Returns a module's own parameters and buffers, and tensors that are plain attributes, each with its place."""
    tables: list[dict[str, Any]] = [part._parameters, part._buffers, vars(part)]
    return [(table, name, each) for table in tables for name, each in table.items() if isinstance(each, torch.Tensor)]


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns a value as what a tensor is, a parameter or not, with its attributes and hooks."""
    made = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    vars(made).update(vars(tensor))
    made._backward_hooks = tensor._backward_hooks
    made._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    return made
