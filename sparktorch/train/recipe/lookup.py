"""Resolves class names of torch, import paths and callables, and names them in messages."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn, optim

from sparktorch.base.imports import load_object
from sparktorch.errors import ModuleError, nearest, refusing

__all__ = [
    "building",
    "check_name",
    "has_fused_kernel",
    "look_up",
    "name_of",
    "parameters_of",
    "signature_of",
    "unknown_parameter",
]

# Where torch has the classes that may be named: the namespace, their base class, and the ending of their names.
_TORCH_CLASSES: dict[str, tuple[Any, type, str]] = {
    "loss": (nn, nn.Module, "Loss"),
    "optimizer": (optim, optim.Optimizer, ""),
    "scheduler": (optim.lr_scheduler, optim.lr_scheduler.LRScheduler, ""),
}


def check_name(value: Any, what: str) -> None:
    """Refuses the name of a class that torch does not have; imports nothing."""
    if isinstance(value, str) and ":" not in value:
        look_up(value, what)


def look_up(value: Any, what: str) -> Any:
    """Resolves an import path, or the name of one of torch's losses, optimizers or schedulers, as `what` says.

    A callable is returned as it is.

    Raises:
        ModuleError: The name is unknown, or the value is neither a name nor a callable.
    """
    if callable(value):
        return value
    if isinstance(value, str) and ":" in value:
        return load_object(value)
    namespace, base, suffix = _TORCH_CLASSES[what]
    names = {
        name
        for name, member in vars(namespace).items()
        if isinstance(member, type) and issubclass(member, base) and member is not base and name.endswith(suffix)
    }
    if str(value) not in names:
        raise ModuleError(
            f"{what} {value!r} is unknown", hint=nearest(str(value), names), param=what, code="ST-UNKNOWN-NAME"
        )
    return getattr(namespace, str(value))


def name_of(value: Any) -> str:
    """Returns the name of a class or function, or of an instance's class, for messages."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def parameters_of(factory: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a callable by name; an empty mapping if its signature is unknown."""
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}


def has_fused_kernel(factory: Any, device_type: str) -> bool:
    """Returns whether a factory is an optimizer of torch, or a subclass, with a fused kernel for a type of device.

    The constructors take `fused=True` for devices without the kernel, too, and then the first step fails: on CUDA,
    Adagrad has a kernel since torch 2.12 only.
    """
    if not isinstance(factory, type) or "fused" not in parameters_of(factory):
        return False
    names = [kind.__name__.lower() for kind in factory.__mro__ if getattr(optim, kind.__name__, None) is kind]
    operators = [f"aten::_fused_{name}_" for name in names if hasattr(torch.ops.aten, f"_fused_{name}_")]
    key = torch._C._dispatch_key_for_device(device_type)
    return bool(operators) and torch._C._dispatch_has_computed_kernel_for_dispatch_key(operators[0], key)


def signature_of(factory: Any) -> str:
    """Returns a callable's signature for messages."""
    try:
        return str(inspect.signature(factory))
    except (TypeError, ValueError):
        return "unknown"


def unknown_parameter(factory: Any, names: Iterable[Any]) -> str:
    """Returns a hint for the first name that no parameter has and one is near to; empty if there is none."""
    parameters = parameters_of(factory).values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ""
    accepted = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    for name in names:
        close = difflib.get_close_matches(name, accepted, n=1) if isinstance(name, str) else []
        if close and name not in accepted:
            return f"{name!r} is none of its parameters: did you mean {close[0]!r}? "
    return ""


def building(what: str, factory: Any) -> AbstractContextManager[None]:
    """Returns a context that turns an exception of a factory into a `ModuleError` that shows its parameters."""
    hint = f"its parameters are {signature_of(factory)}"
    return refusing(f"{what} {name_of(factory)} cannot be built", hint, param=f"{what}Params", code="ST-BUILD")
