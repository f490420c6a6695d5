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
from typing import Any, NamedTuple

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

_SMALL = 1 << 20  # A check draws the values of a module that has fewer numbers than this.


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
        # While these references exist, no other tensor gets the id of one of them.
        self._named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._names: dict[int, list[str]] = {id(tensor): [] for _, tensor in self._named}
        # Hooks may have changed the names in the state dict, so a tensor has the names of both.
        for name, tensor in [*module.state_dict(keep_vars=True).items(), *self._named]:
            if id(tensor) in self._names:
                self._names[id(tensor)].append(name)
        self._extra = {id(part): name for name, part in extra_states(module) if name in self.saved}
        # Strategies change the module, so values are drawn in a copy.
        self._blank = _copied(module, {})
        self._empty_slots: dict[str, list[_Slot]] = {}
        self._owners: dict[int, str] = {}
        for path, part in self._blank.named_modules():
            self._empty_slots[path] = [slot for slot in _slots(part) if slot.tensor.is_meta]
            for slot in self._empty_slots[path]:
                # The first of the modules that hold a tensor resets it.
                self._owners.setdefault(id(slot.tensor), path)
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}
        for part in module.modules():
            for slot in _slots(part):
                self._holders.setdefault(id(slot.tensor), []).append((part, slot.name))

    @torch.no_grad()
    def materialise(self, part: nn.Module) -> None:
        """Gives the tensors of a part that have no values their values, on the CPU; tied ones stay tied.

        A `ModuleError` names one that is neither saved nor set by `reset_parameters`.
        """
        # Freed memory of an earlier part lies between the shards that were kept of it.
        trim()
        for module in part.modules():
            reset = cache(self._reset)
            for slot in _slots(module):
                tensor = slot.tensor
                # A tensor that has values may be saved, too, such as one that was made of a NumPy array.
                saved_name = self._saved_name(id(tensor))
                if saved_name is not None:
                    value = self.saved[saved_name].to(tensor.dtype)
                elif tensor.is_meta:
                    value = reset(self._owners[id(tensor)])[id(tensor)]
                else:
                    continue
                real = _like(tensor, value)
                for holder, name in [(module, slot.name), *self._holders.get(id(tensor), ())]:
                    if getattr(holder, name, None) is tensor:
                        # setattr, because recurrent modules keep what is set in a list, too.
                        setattr(holder, name, real)
            extra = self._extra.pop(id(module), None)
            if extra is not None:
                module.set_extra_state(self.saved[extra])

    @property
    def lacking(self) -> list[str]:
        """Names of a state dict that have no saved value."""
        state = self.module.state_dict(keep_vars=True)
        return [name for name, value in state.items() if name not in self.saved and not self._saved_name(id(value))]

    def check_saved(self) -> None:
        """Raises a `ModuleError` if names or shapes of saved values are not those of this module."""
        state, kind = self.module.state_dict(keep_vars=True), type(self.module).__qualname__
        wrong = [f"lack {name!r}, which {kind} has" for name in self.lacking]
        wrong += [f"have {name!r}, which {kind} has not" for name in sorted(self.saved.keys() - state.keys())]
        if not wrong:
            for name, tensor in state.items():
                saved_name = self._saved_name(id(tensor))
                if saved_name is None or self.saved[saved_name].shape == tensor.shape:
                    continue
                shape = tuple(self.saved[saved_name].shape)
                wrong.append(f"have {name!r} of the shape {shape}, and that of {kind} has {tuple(tensor.shape)}")
        if wrong:
            hint = "they must be those of the same module, under its names"
            raise ModuleError(f"the saved weights {wrong[0]}", hint=hint, param="module")

    def check_reset(self) -> None:
        """Raises a `ModuleError` if no method sets a tensor that is not saved; large modules only have to have one."""
        for path, slots in self._empty_slots.items():
            unsaved = any(self._saved_name(id(slot.tensor)) is None for slot in slots)
            small = sum(slot.tensor.numel() for slot in slots) < _SMALL
            if unsaved and (small or not self._resets(path)):
                self._reset(path)

    def _saved_name(self, key: int) -> str | None:
        """Returns the name under which a tensor is saved, which may have several."""
        return next((name for name in self._names.get(key, ()) if name in self.saved), None)

    @torch.no_grad()
    def _reset(self, path: str) -> dict[int, torch.Tensor]:
        """Returns the values that a module's tensors get when it is reset, by the `id` of what stands for them."""
        first = second = self._drawn(path, 0)
        if not all(_has_nan(value) for _, value in first.values()):
            second = self._drawn(path, 1)
        for key, (name, value) in first.items():
            # A value that was not set is NaN, which is unlike itself, or what it was filled with, which differs.
            if not self._saved_name(key) and (value.is_meta or bool((value != second[key][1]).any())):
                kind, full_name = type(self._blank.get_submodule(path)).__qualname__, f"{path}.{name}".removeprefix(".")
                what = f"with modelDir, {full_name!r} has no value: no reset_parameters() sets it"
                hint = f"set it in a method reset_parameters() of {kind}, or of what it is in; or leave modelDir out"
                raise ModuleError(what, hint=hint, param="module")
        return {key: value for key, (_, value) in first.items()}

    def _drawn(self, path: str, fill: int) -> dict[int, tuple[str, torch.Tensor]]:
        """Fills a module's tensors with NaN, or `fill` if they are no floats, and resets it; all others stay "meta"."""
        part = self._blank.get_submodule(path)
        slots = [slot for slot in self._empty_slots[path] if self._owners[id(slot.tensor)] == path]
        seed = hashlib.sha256(f"{self._seed} {path}".encode()).digest()[:8]
        what = f"{path!r}, a {type(part).__qualname__}, cannot be reset"
        hint = "with modelDir, reset_parameters() may read tensors of its own module only"
        try:
            with refusing(what, hint, param="module"), torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(int.from_bytes(seed))
                for table, name, tensor in slots:
                    filled = torch.empty_like(tensor, device="cpu").fill_(torch.nan if _has_nan(tensor) else fill)
                    table[name] = _like(tensor, filled)
                for reset in self._resets(path):
                    reset()
                return {id(tensor): (name, table[name].detach()) for table, name, tensor in slots}
        finally:
            # A method may have set tensors of other modules, too.
            for table, name, tensor in chain.from_iterable(self._empty_slots.values()):
                table[name] = tensor

    def _resets(self, path: str) -> list[Callable[[], Any]]:
        """Returns what sets a module's tensors: its own method and then those above it, as `Module.apply` would."""
        parts = [self._blank]
        for name in filter(None, path.split(".")):
            parts.insert(0, parts[0].get_submodule(name))
        methods = [getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None)) for part in parts]
        # A model may set the tensors of each part of it by _init_weights(part); the nearest one counts.
        for number, part in enumerate(parts):
            for above in parts[number:]:
                init = getattr(above, "_init_weights", None)
                if callable(init) and len(inspect.signature(init).parameters) == 1:
                    methods.append(partial(init, part))
                    break
        return [method for method in methods if callable(method)]


def deferred(
    make: Callable[[], nn.Module],
    saved: Mapping[str, torch.Tensor] | Callable[[nn.Module], Mapping[str, torch.Tensor]] | None = None,
    *,
    seed: int = 0,
) -> Deferred:
    """Calls a module's factory on the device "meta"; `saved` may be a function of the module."""
    with torch.device("meta"), _Copies() as copies:  # type: ignore[no-untyped-call]
        module = make()
    # Models of transformers copy values, too, but _init_weights sets these again.
    if copies.lost and not hasattr(module, "_init_weights"):
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


def _copied(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """Returns a module of the same classes and tensors, which may be set there; tensors with values are copies.

    `copies` has the copies that were made before, by the id of the module, so that shared modules stay shared.
    """
    if id(module) not in copies:
        copies[id(module)] = copied = object.__new__(type(module))
        vars(copied).update(vars(module))
        for kind in ("_parameters", "_buffers"):
            table = vars(module)[kind]
            vars(copied)[kind] = {
                name: tensor if tensor is None or tensor.is_meta else tensor.clone() for name, tensor in table.items()
            }
        vars(copied)["_modules"] = {
            name: None if part is None else _copied(part, copies) for name, part in module._modules.items()
        }
    return copies[id(module)]


class _Slot(NamedTuple):
    """Where a module holds a tensor: the table of its parameters, buffers or attributes, and the name in it."""

    table: dict[str, Any]
    name: str
    tensor: torch.Tensor


def _slots(part: nn.Module) -> list[_Slot]:
    """Returns where a module, without its parts, holds parameters, buffers, and tensors that are plain attributes."""
    tables: list[dict[str, Any]] = [part._parameters, part._buffers, vars(part)]
    return [
        _Slot(table, name, value)
        for table in tables
        for name, value in table.items()
        if isinstance(value, torch.Tensor)
    ]


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns a value as what a tensor is, a parameter or not, with its attributes and hooks."""
    result = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    vars(result).update(vars(tensor))
    result._backward_hooks = tensor._backward_hooks
    result._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    return result
