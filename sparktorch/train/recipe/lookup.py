"""Resolves class names of torch, import paths and callables, and names them in messages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn, optim

from sparktorch.base.imports import load_object
from sparktorch.errors import ModuleError, nearest, refusing

__all__ = ["building", "check_name", "look_up", "name_of", "parameters_of", "signature_of"]

# Where torch has the classes that a name may be of, their base class, and how the names end.
_OF_TORCH: dict[str, tuple[Any, type, str]] = {
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
    namespace, base, suffix = _OF_TORCH[what]
    names = {
        name
        for name, found in vars(namespace).items()
        if isinstance(found, type) and issubclass(found, base) and found is not base and name.endswith(suffix)
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


def signature_of(factory: Any) -> str:
    """Returns a callable's signature for messages."""
    try:
        return str(inspect.signature(factory))
    except (TypeError, ValueError):
        return "unknown"


def building(what: str, factory: Any) -> AbstractContextManager[None]:
    """Returns a context that turns an exception of a factory into a `ModuleError` that shows its parameters."""
    hint = f"its parameters are {signature_of(factory)}"
    return refusing(f"{what} {name_of(factory)} cannot be built", hint, param=f"{what}Params", code="ST-BUILD")
