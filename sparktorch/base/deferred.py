"""Modules without values: built on the device "meta", which takes no memory, and made real part by part.

As in torch's deferred initialisation, each module sets its parameters and buffers in a method `reset_parameters`. The
method is called under a seed for this module, so that the values do not depend on the order in which parts become real.
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

# Makes torch list the functions that make tensors, which it does once, when a device is first set by a context. A
# library may replace one of these functions, such as linspace, while it loads a model.
with torch.device("meta"):
    torch.empty(0)

_SMALL = 1 << 20  # `check_reset` tries out the reset of a module that has fewer values than this.


class PartialWeights(Mapping[str, torch.Tensor]):
    """Saved values, by name, that need not be exactly those of a module: differences are logged, and not refused."""

    @abstractmethod
    def log_differences(self, built: Deferred) -> None:
        """Logs which values of the module are not saved, and which saved values the module lacks."""


class Deferred:
    """A module on the device "meta", whose parts `materialise` makes real.

    Before that, `check_saved` and `check_reset` refuse modules that could not become real.

    Attributes:
        module: The module.
        saved: Values by name, which take the place of the values that `reset_parameters` sets.
    """

    def __init__(self, module: nn.Module, saved: Mapping[str, torch.Tensor] | None = None, *, seed: int = 0) -> None:
        """Takes a module, saved values by name, and the seed of all other values."""
        self.module = module
        self.saved = {} if saved is None else saved
        self._seed = seed
        # While these references exist, no other tensor gets the id of one of these tensors.
        self._named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._names: dict[int, list[str]] = {id(tensor): [] for _, tensor in self._named}
        # Hooks may have changed names in the state dict, so a tensor has its names there and in the module.
        for name, tensor in [*module.state_dict(keep_vars=True).items(), *self._named]:
            if id(tensor) in self._names:
                self._names[id(tensor)].append(name)
        self._extra = {id(part): name for name, part in extra_states(module) if name in self.saved}
        # Strategies change the module, so values are drawn in a copy.
        self._blank = _copy_structure(module, {})
        # By the path of each module, its slots without values; and by tensor, the path of the module that resets it.
        self._empty_slots: dict[str, list[_Slot]] = {}
        self._owners: dict[int, str] = {}
        for path, part in self._blank.named_modules():
            self._empty_slots[path] = [slot for slot in _slots(part) if slot.tensor.is_meta]
            for slot in self._empty_slots[path]:
                # If several modules hold a tensor, the first one resets it.
                self._owners.setdefault(id(slot.tensor), path)
        # By tensor, the modules that hold it, and its name in each of them.
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}
        for part in module.modules():
            for slot in _slots(part):
                self._holders.setdefault(id(slot.tensor), []).append((part, slot.name))

    @torch.no_grad()
    def materialise(self, part: nn.Module) -> None:
        """Gives the tensors of a part their values, on the CPU; tied tensors stay tied.

        A `ModuleError` names a tensor that is neither saved nor set by `reset_parameters`.
        """
        # The freed memory of earlier parts lies in pieces between the shards that a rank keeps of them.
        trim()
        for module in part.modules():
            reset = cache(self._reset)
            for slot in _slots(module):
                tensor = slot.tensor
                # A tensor that has values, such as one made from a NumPy array, may be saved, too.
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
                        # Recurrent modules keep their weights in a list, too, which setattr updates.
                        setattr(holder, name, real)
            extra = self._extra.pop(id(module), None)
            if extra is not None:
                module.set_extra_state(self.saved[extra])

    @property
    def lacking(self) -> list[str]:
        """Names in the module's state dict that have no saved value."""
        state = self.module.state_dict(keep_vars=True)
        return [name for name, value in state.items() if name not in self.saved and not self._saved_name(id(value))]

    def check_saved(self) -> None:
        """Raises a `ModuleError` if names or shapes of saved values differ from those in this module."""
        state = self.module.state_dict(keep_vars=True)
        kind = type(self.module).__qualname__
        problems = [f"lack {name!r}, which {kind} has" for name in self.lacking]
        problems += [f"have {name!r}, which {kind} has not" for name in sorted(self.saved.keys() - state.keys())]
        if not problems:
            for name, tensor in state.items():
                saved_name = self._saved_name(id(tensor))
                if saved_name is None or self.saved[saved_name].shape == tensor.shape:
                    continue
                shape = tuple(self.saved[saved_name].shape)
                problems.append(f"have {name!r} of the shape {shape}, and that of {kind} has {tuple(tensor.shape)}")
        if problems:
            hint = "they must be those of the same module, under its names"
            raise ModuleError(f"the saved weights {problems[0]}", hint=hint, param="module")

    def check_reset(self) -> None:
        """Raises a `ModuleError` if no method sets a tensor that is not saved.

        Small modules are reset to see whether it does. A large module passes if it has a method.
        """
        for path, slots in self._empty_slots.items():
            has_unsaved = any(self._saved_name(id(slot.tensor)) is None for slot in slots)
            is_small = sum(slot.tensor.numel() for slot in slots) < _SMALL
            if has_unsaved and (is_small or not self._resets(path)):
                self._reset(path)

    def _saved_name(self, key: int) -> str | None:
        """Returns the name under which a tensor, which may have several names, is saved; `key` is its id."""
        return next((name for name in self._names.get(key, ()) if name in self.saved), None)

    @torch.no_grad()
    def _reset(self, path: str) -> dict[int, torch.Tensor]:
        """Returns the values that a module's tensors get when it is reset, by the id of the tensor on "meta"."""
        first = self._draw(path, 0)
        # Integers and booleans are drawn twice, over different fill values. NaN, the fill of floats, tells by itself.
        second = first if all(_can_be_nan(value) for _, value in first.values()) else self._draw(path, 1)
        for key, (name, value) in first.items():
            # An element that was not set is NaN, which differs from itself, or one fill value and then the other.
            if not self._saved_name(key) and (value.is_meta or bool((value != second[key][1]).any())):
                kind = type(self._blank.get_submodule(path)).__qualname__
                full_name = f"{path}.{name}".removeprefix(".")
                what = f"with modelDir, {full_name!r} has no value: no reset_parameters() sets it"
                hint = f"set it in a method reset_parameters() of {kind}, or of what it is in; or leave modelDir out"
                raise ModuleError(what, hint=hint, param="module")
        return {key: value for key, (_, value) in first.items()}

    def _draw(self, path: str, fill: int) -> dict[int, tuple[str, torch.Tensor]]:
        """Fills a module's tensors, resets the module, and returns their names and values by the ids of the tensors.

        Floats are filled with NaN, other tensors with `fill`. The tensors of other modules stay on "meta".
        """
        part = self._blank.get_submodule(path)
        slots = [slot for slot in self._empty_slots[path] if self._owners[id(slot.tensor)] == path]
        seed = int.from_bytes(hashlib.sha256(f"{self._seed} {path}".encode()).digest()[:8])
        what = f"{path!r}, a {type(part).__qualname__}, cannot be reset"
        hint = "with modelDir, reset_parameters() may read tensors of its own module only"
        try:
            with refusing(what, hint, param="module"), torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(seed)
                for table, name, tensor in slots:
                    filled = torch.empty_like(tensor, device="cpu").fill_(torch.nan if _can_be_nan(tensor) else fill)
                    table[name] = _like(tensor, filled)
                for reset in self._resets(path):
                    reset()
                return {id(tensor): (name, table[name].detach()) for table, name, tensor in slots}
        finally:
            # A method may have set tensors of other modules, too.
            for table, name, tensor in chain.from_iterable(self._empty_slots.values()):
                table[name] = tensor

    def _resets(self, path: str) -> list[Callable[[], Any]]:
        """Returns the methods that set a module's tensors: its own, and then those of the modules that it is in.

        `Module.apply` would call them in the same order.
        """
        # The module comes first, then the module that it is in, and so on.
        parts = [self._blank]
        for name in filter(None, path.split(".")):
            parts.insert(0, parts[0].get_submodule(name))
        methods = [getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None)) for part in parts]
        # A model may set the tensors of each of its parts by `_init_weights(part)`; that of the nearest model counts.
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
    """Calls a module's factory on the device "meta"; `saved` may be a function that gets the module.

    A `ModuleError` refuses a constructor that copies values into its tensors, which have no values.
    """
    with torch.device("meta"), _LostCopies() as copies:  # type: ignore[no-untyped-call]
        module = make()
    # Models of transformers copy values, too, but _init_weights sets these again.
    if copies.happened and not hasattr(module, "_init_weights"):
        raise ModuleError(
            f"the constructor of {type(module).__qualname__} copies values into tensors, as load_state_dict does, "
            "and is called without values",
            hint="set them in reset_parameters(), give a folder of weights as module, or leave modelDir out",
            param="module",
        )
    return Deferred(module, saved(module) if callable(saved) else saved, seed=seed)


class _LostCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether values are copied into tensors without values, where they are lost."""

    happened = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.happened |= func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta
        return func(*args, **(kwargs or {}))


def _copy_structure(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """Returns a module of the same classes, whose tensors may be replaced without a change to the original.

    Tensors on "meta" are the same objects in both, tensors with values are copies. `copies` has the copies that were
    made before, by the id of the module, so that shared modules stay shared.
    """
    if id(module) in copies:
        return copies[id(module)]
    copy = object.__new__(type(module))
    copies[id(module)] = copy
    vars(copy).update(vars(module))
    for table_name in ("_parameters", "_buffers"):
        vars(copy)[table_name] = {
            name: tensor if tensor is None or tensor.is_meta else tensor.clone()
            for name, tensor in vars(module)[table_name].items()
        }
    vars(copy)["_modules"] = {
        name: None if part is None else _copy_structure(part, copies) for name, part in module._modules.items()
    }
    return copy


class _Slot(NamedTuple):
    """A place where a module holds a tensor.

    Attributes:
        table: The module's parameters, buffers or other attributes, by name.
        name: The name of the tensor in the table.
        tensor: The tensor.
    """

    table: dict[str, Any]
    name: str
    tensor: torch.Tensor


def _slots(part: nn.Module) -> list[_Slot]:
    """Returns the slots of a module without its parts: parameters, buffers, and tensors that are plain attributes."""
    tables: list[dict[str, Any]] = [part._parameters, part._buffers, vars(part)]
    return [
        _Slot(table, name, value)
        for table in tables
        for name, value in table.items()
        if isinstance(value, torch.Tensor)
    ]


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns a value as a parameter if `tensor` is one, with the attributes and hooks of `tensor`."""
    result = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    vars(result).update(vars(tensor))
    result._backward_hooks = tensor._backward_hooks
    result._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    return result
