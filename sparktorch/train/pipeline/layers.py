"""The calls of layers while a forward pass is recorded: each is one operator of the graph, called later as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.errors import ModuleError
from sparktorch.train.flops import flop_counter
from sparktorch.train.pipeline.kept import equal

__all__ = ["Call", "Modes", "call_of_layer", "check_functions", "memory_of", "recorded_layers"]

_OF_OPERATOR = "GeneratedBackwardFor"  # torch's name of the backward pass of a custom operator, which is recorded


@dataclass(frozen=True)
class Modes:
    """Modes of torch in which something is computed.

    Attributes:
        gradients: Whether gradients are enabled.
        autocast: By type of device, the dtype of autocast there; `None` where it is disabled.
    """

    gradients: bool
    autocast: dict[str, torch.dtype | None]

    @classmethod
    def now(cls, *kinds: str) -> Modes:
        """Returns those of this thread, for some types of devices."""
        return cls(torch.is_grad_enabled(), {kind: _autocast(kind) for kind in kinds})

    def entered(self) -> AbstractContextManager[Any]:
        """Returns a context with these modes; it enables no gradients."""
        others = [kind for kind, dtype in self.autocast.items() if dtype != _autocast(kind)]
        gradients = self.gradients or not torch.is_grad_enabled()
        return nullcontext() if gradients and not others else self._changed(others, gradients=gradients)

    @contextmanager
    def _changed(self, others: Sequence[str], *, gradients: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if not gradients:
                stack.enter_context(torch.no_grad())
            for kind in others:
                dtype = self.autocast[kind]
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
            yield


def _autocast(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@dataclass
class Call:
    """A call of a layer.

    Attributes:
        layer: Name of the layer.
        arguments: Its arguments, flattened; the tensors among them are those of another call.
        spec: How they were nested.
        places: Which of them are tensors.
        result_spec: How its result was nested.
        result_places: Which values of the result are tensors.
        result_gradients: Which of these require gradients.
        work: Floating-point operations of its forward pass.
        written: Which of the tensors among its arguments it changes in place, and whether they require gradients then.
        shared: Which tensors of the result have the memory of which of these.
    """

    layer: str
    arguments: list[Any]
    spec: Any
    places: list[int]
    result_spec: Any = None
    result_places: list[int] = field(default_factory=list)
    result_gradients: list[bool] = field(default_factory=list)
    work: int = 0
    written: dict[int, bool] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)

    def __call__(self, part: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Calls the layer with other tensors; returns the tensors of its result."""
        values = list(self.arguments)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = (values, {}) if self._plain else pytree.tree_unflatten(values, self.spec)
        result = part(*args, **kwargs)
        found = [result] if isinstance(result, torch.Tensor) else pytree.tree_leaves(result)
        return [value for value in found if isinstance(value, torch.Tensor)]

    @cached_property
    def _plain(self) -> bool:
        """Whether the arguments are positional and not nested: nothing is put together again in each call."""
        plain: bool = self.spec == pytree.tree_structure((tuple(range(len(self.arguments))), {}))
        return plain


def memory_of(tensor: torch.Tensor) -> int:
    """Returns a number for the memory of a tensor, which its views have, too."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _tensors(values: Sequence[Any]) -> list[int]:
    return [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]


class _Of(threading.local):
    """What this thread records.

    Attributes:
        results: What the layer that is being recorded has returned.
        within: Whether a layer is being called.
    """

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []
        self.within = False


_of = _Of()


@cache
def call_of_layer() -> Any:
    """Returns the operator that stands for a layer while a forward pass is recorded."""

    @torch.library.custom_op("sparktorch::layer", mutates_args=())
    def layer(number: int, tensors: list[torch.Tensor], seed: torch.Tensor | None) -> list[torch.Tensor]:
        raise AssertionError("it is recorded, and never called")

    @layer.register_fake
    def _(number: int, tensors: list[torch.Tensor], seed: torch.Tensor | None) -> list[torch.Tensor]:
        return [torch.empty_like(tensor) for tensor in _of.results]  # an operator may not return what it got

    return torch.ops.sparktorch.layer


@contextmanager
def recorded_layers(module: nn.Module, names: Sequence[str], calls: list[Call], seed: torch.Tensor) -> Iterator[None]:
    """Context in which the named parts of a module are recorded as calls, with their hooks.

    Args:
        module: The module.
        names: Names of the parts.
        calls: Where the calls are added.
        seed: A scalar that requires gradients; so do the results of layers that it is passed to.

    Raises:
        ModuleError: A layer gets what a later call would not, such as an attribute that is set above it.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    operator = call_of_layer().default
    seen: set[Any] = set()

    def instead(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if _of.within:  # a part of another layer, too
                return part(*args, **kwargs)
            flat, spec = pytree.tree_flatten((args, kwargs))
            call, number = Call(name, flat, spec, _tensors(flat)), len(calls)
            calls.append(call)
            check_functions(flat, seen)
            _check_saved(name, module.get_submodule(name))
            _check_given(name, flat, kept.get(name), _kept_by(module, name))
            inputs = [flat[place] for place in call.places]
            versions, given = [each._version for each in inputs], [memory_of(each) for each in inputs]
            _of.within = True
            try:
                with disable_proxy_modes_tracing(), flop_counter() as counter:
                    values, call.result_spec = pytree.tree_flatten(part(*args, **kwargs))
            finally:
                _of.within = False
            kept[name] = _kept_by(module, name)
            call.work, call.result_places = counter.get_total_flops(), _tensors(values)
            _of.results = [values[place] for place in call.result_places]
            call.result_gradients = [result.requires_grad for result in _of.results]
            call.written = {i: each.requires_grad for i, each in enumerate(inputs) if each._version != versions[i]}
            returned = [memory_of(result) for result in _of.results]
            call.shared = {i: given.index(memory) for i, memory in enumerate(returned) if memory in given}
            if any(call.result_gradients):
                found = operator(number, inputs, seed)
            else:
                with torch._C._AutoDispatchBelowAutograd():
                    found = operator(number, inputs, None)
            _of.results = []
            for place, tensor in zip(call.result_places, found, strict=True):
                values[place] = tensor
            call.arguments = [None if isinstance(value, torch.Tensor) else value for value in flat]
            return pytree.tree_unflatten(values, call.result_spec)

        return recorded

    parts = [module.get_submodule(name) for name in names]
    kept = {name: _kept_by(module, name) for name in names}
    try:
        for name, part in zip(names, parts, strict=True):
            vars(part)["_call_impl"] = instead(name, part._call_impl)
        yield
    finally:
        for part in parts:
            vars(part).pop("_call_impl", None)


def _kept_by(module: nn.Module, name: str) -> dict[str, Any]:
    """Returns the numbers, texts and flags that a layer and its parts keep."""
    return {
        f"{path}.{attribute}" if path else attribute: value
        for path, part in module.get_submodule(name).named_modules()
        for attribute, value in vars(part).items()
        if isinstance(value, bool | int | float | str | torch.Tensor)
    }


def _check_saved(name: str, part: nn.Module) -> None:
    """Refuses a checkpoint, or the like, around a layer; its own, as of layers of transformers, is called with it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and type(part).__call__ is nn.Module.__call__:
        raise ModuleError(
            f"the forward pass calls {name!r} in a checkpoint, or in other hooks for saved tensors, which are not "
            "recorded",
            hint="call it without, and set strategyParams.activation_checkpointing; or divide the module with "
            "strategyParams.shard",
            param="module",
        )


def _check_given(name: str, values: Iterable[Any], before: Any, now: Mapping[str, Any]) -> None:
    """Refuses what a layer gets from above it, but would not get where a stage calls it.

    Args:
        name: Name of the layer.
        values: Its arguments, flattened.
        before: What it kept after the call before, or at first.
        now: What it keeps.
    """
    changed = [attribute for attribute, value in now.items() if not equal(before.get(attribute), value)]
    if changed:
        raise ModuleError(
            f"the forward pass sets attribute {changed[0]!r} of {name!r} from outside, and a stage calls it alone",
            hint="pass it as an argument, or divide the module with strategyParams.shard",
            param="module",
        )
    for value in values:
        held = [] if isinstance(value, nn.Module) else getattr(value, "__dict__", {}).values()
        if not isinstance(value, torch.Tensor) and any(isinstance(each, torch.Tensor) for each in held):
            raise ModuleError(
                f"the forward pass passes an object with tensors, of type {type(value).__name__}, to {name!r}",
                hint="pass the tensors themselves, in tuples, lists or dicts",
                param="module",
            )


def check_functions(values: Iterable[Any], seen: set[Any]) -> None:
    """Refuses functions with a backward pass of their own above layers, which is not recorded.

    Args:
        values: Tensors that were computed above layers.
        seen: Steps of their backward pass that were seen before; is added to.
    """
    left = [value.grad_fn for value in values if isinstance(value, torch.Tensor)]
    while left:
        step = left.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        name = type(step).__name__.removesuffix("Backward")
        if isinstance(step, torch.autograd.function.BackwardCFunction) and not name.startswith(_OF_OPERATOR):
            raise ModuleError(
                f"the forward pass calls {name} above its layers, whose own backward pass is not recorded",
                hint="call it within a layer; instead of a checkpoint, set strategyParams.activation_checkpointing",
                param="module",
            )
        left.extend(following for following, _ in step.next_functions)
