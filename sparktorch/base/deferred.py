"""Modules without values: built of torch's fake tensors, which take no memory, and made real part by part.

`deferred` records what a constructor does to tensors. To make one of them real, what was done to it, and to those that
it was computed from, is done again, with the random numbers that the constructor would have drawn. So the values are
those that the constructor alone would have made, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode

from sparktorch.base.host_memory import trim
from sparktorch.base.references import check_references
from sparktorch.base.state_dict import extra_states
from sparktorch.base.tape import NotDrawnError, Tape, is_fake
from sparktorch.errors import ModuleError

__all__ = ["Deferred", "deferred", "needs_values"]

_lock = threading.RLock()  # of what `_unconverted` changes

with FakeTensorMode():
    _OWN = vars(nn.Parameter(torch.empty(0))).keys()  # the attributes of every fake tensor


class Deferred:
    """A module of fake tensors on the CPU, whose parts `materialise` makes real.

    Attributes:
        module: The module.
        mode: The mode of its tensors, in which it can be called with fake inputs.
        saved: Values of parameters and buffers by name, in place of those that its constructor makes.
    """

    def __init__(self, module: nn.Module, mode: FakeTensorMode, tape: Tape, saved: Mapping[str, torch.Tensor]) -> None:
        """Takes a module, what its constructor did, and saved values by name."""
        self.module, self.mode, self.saved = module, mode, saved
        self._tape = tape
        own = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        self._kept = [tensor for _, tensor in own]  # an id is that of one tensor only
        self._names: dict[int, list[str]] = {id(tensor): [] for tensor in self._kept}
        for name, tensor in [*module.state_dict(keep_vars=True).items(), *own]:  # hooks may have changed names
            if id(tensor) in self._names:
                self._names[id(tensor)].append(name)
        self._extra = {id(part): name for name, part in extra_states(module) if name in saved}
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for part, name, tensor in _tensors(module):
            self._places.setdefault(id(tensor), []).append((part, name))
        check_references(module, self._names)

    @torch.no_grad()
    def materialise(self, part: nn.Module) -> None:
        """Gives those tensors of a part that are fake their values, on the CPU: parameters, buffers, plain attributes.

        One that other parts have, too, is real in these as well: tied parameters stay tied.
        """
        trim()  # what an earlier part has left, between the shards that were kept of it
        for below, name, tensor in list(_tensors(part)):
            # A real tensor, as of a NumPy array, has a saved value all the same.
            if getattr(below, name) is tensor and (is_fake(tensor) or self._saved_as(tensor) is not None):
                made = self._made(tensor)
                for owner, called in [(below, name), *self._places.get(id(tensor), ())]:
                    if getattr(owner, called, None) is tensor:
                        setattr(owner, called, made)  # recurrent modules keep what is set in a list, too
        for owner in part.modules():
            if (extra := self._extra.pop(id(owner), None)) is not None:
                owner.set_extra_state(self.saved[extra])

    @property
    def lacking(self) -> list[str]:
        """Names of a state dict that have no saved value."""
        wanted = self.module.state_dict(keep_vars=True)
        return [name for name, value in wanted.items() if name not in self.saved and self._saved_as(value) is None]

    def check_saved(self) -> None:
        """Checks that saved values are those of this module.

        Raises:
            ModuleError: Names or shapes differ.
        """
        wanted, lacking = self.module.state_dict(keep_vars=True), self.lacking
        unknown = sorted(self.saved.keys() - wanted.keys())
        if lacking or unknown:
            raise ModuleError(
                f"the saved weights {f'lack {lacking[0]!r}' if lacking else f'have {unknown[0]!r}'}, which "
                f"{type(self.module).__qualname__} {'has' if lacking else 'has not'}",
                hint="they must be those of the same module, under its names",
                param="module",
            )
        for name, tensor in wanted.items():
            if (saved := self._saved_as(tensor)) and (shape := self.saved[saved].shape) != tensor.shape:
                raise ModuleError(
                    f"the saved {name!r} has the shape {tuple(shape)}, and that of {type(self.module).__qualname__} "
                    f"has {tuple(tensor.shape)}",
                    hint="they must be those of the same module",
                    param="module",
                )

    def check_drawn(self) -> None:
        """Raises `NotDrawnError` if a value is neither saved nor known without random numbers.

        Raises:
            ModuleError: A value comes from elsewhere.
        """
        for tensor in self._kept:
            if is_fake(tensor) and self._saved_as(tensor) is None:
                self._tape.needed(tensor, self._names[id(tensor)][0])

    def _saved_as(self, tensor: torch.Tensor) -> str | None:
        """Returns the name under which a tensor is saved, which may have several."""
        return next((name for name in self._names.get(id(tensor), ()) if name in self.saved), None)

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        name = self._saved_as(tensor)
        value = self._tape.value(tensor) if name is None else self.saved[name].to(tensor.dtype)
        return _like(tensor, value)


def deferred(
    make: Callable[[], nn.Module],
    saved: Mapping[str, torch.Tensor] | Callable[[nn.Module], Mapping[str, torch.Tensor]] | None = None,
    *,
    exact: bool = True,
) -> Deferred:
    """Calls a module's factory so that its tensors are fake.

    Args:
        make: Returns a module. It may be called twice.
        saved: Values of parameters and buffers by name, in place of those that the factory makes; or a function that
            returns them for a module without values.
        exact: Whether random values are those that the factory alone would have made; otherwise none is drawn but those
            that the factory looks at, which are others.

    Raises:
        ModuleError: The factory does what cannot be recorded; says what.
    """
    saved = saved or {}
    values_of = saved if callable(saved) else lambda _: saved
    if not exact:
        found = _built(make, values_of, Tape(draws=False, others=True))
        found.check_drawn()
        return found
    with torch.random.fork_rng(devices=()), suppress(NotDrawnError):
        if saved:  # random numbers that nothing needs are not drawn
            found = _built(make, values_of, Tape(draws=False))
            found.check_drawn()
            return found
    return _built(make, values_of, Tape(draws=True))


def _built(
    make: Callable[[], nn.Module], values_of: Callable[[nn.Module], Mapping[str, torch.Tensor]], tape: Tape
) -> Deferred:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _lock, mode, tape, _Copies(), _unconverted():
        module = make()
    tape.let_go()
    return Deferred(module, mode, tape, values_of(module))


class _Copies(TorchFunctionMode):
    """Copies tensors without the mode that fake ones belong to, which `copy.deepcopy` would copy, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch."""
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            with nullcontext() if is_fake(tensor) else unset_fake_temporarily():
                memo[id(tensor)] = _like(tensor, tensor.detach().clone())
        return memo[id(tensor)]


@contextmanager
def _unconverted() -> Iterator[None]:
    """Context in which `Module.to` and the like take parameters that they do not change; other threads see no change.

    Raises:
        ModuleError: They would change one. torch swaps the contents of fake parameters, which it cannot here.
    """
    before: Any = nn.Module._apply
    own = threading.get_ident()

    def apply(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        if threading.get_ident() != own:
            found: nn.Module = before(module, fn, recurse)
            return found
        for part in module.modules() if recurse else [module]:
            for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
                if tensor is None or (made := fn(tensor)) is tensor:
                    continue
                if (made.dtype, made.device) == (tensor.dtype, tensor.device):
                    continue  # another memory format, which shards do not have
                if name in part._parameters:
                    raise ModuleError(
                        f"the constructor converts {name!r} of {type(part).__qualname__}, as by .to(dtype)",
                        hint="make it with dtype=... in the first place, or leave modelDir out",
                        param="module",
                    )
                part._buffers[name] = made
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yields the parameters and buffers of a module, and tensors that are plain attributes, with owner and name."""
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, vars(part))
        for table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor):
                    yield part, name, tensor


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns a value as what a tensor is, a parameter or not, with its attributes and hooks."""
    made = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    vars(made).update({name: it for name, it in vars(tensor).items() if name not in _OWN})
    made._backward_hooks = tensor._backward_hooks
    made._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    return made


def needs_values(error: BaseException | None) -> bool:
    """Whether an error says that a call of a module without values needs the value of a tensor."""
    kinds = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
    return isinstance(error, kinds) or "not supported for tensor subclasses" in str(error)  # .numpy(), .tolist()
