"""Recognises models of transformers without importing the library, and names their arguments."""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any

from torch import nn

from sparktorch.errors import ModuleError

__all__ = ["argument_names", "is_config", "is_folder", "is_model", "model_in", "names_of_arguments"]


def is_model(value: Any) -> bool:
    """Whether a value is a model of transformers, or the class of one."""
    kind = _kind(value)
    return _of_transformers(kind) and issubclass(kind, nn.Module) and hasattr(kind, "from_pretrained")


def model_in(module: Any) -> Any:
    """Returns the transformers model: the module, or what a `PeftModel` adapts; `None` for any other module."""
    base = module.get_base_model() if hasattr(type(module), "get_base_model") else module
    return base if is_model(base) else None


def is_config(value: Any) -> bool:
    """Whether a value is the configuration of a transformers model, or the class of one."""
    kind = _kind(value)
    return _of_transformers(kind) and hasattr(kind, "model_type") and hasattr(kind, "from_dict")


def is_folder(value: Any) -> bool:
    """Whether a value is a path of a folder, and no import path."""
    return isinstance(value, os.PathLike) or (isinstance(value, str) and (os.sep in value or Path(value).is_dir()))


def names_of_arguments(kind: Any) -> tuple[str, ...]:
    """Returns the names of the arguments of a class of models."""
    parameters = inspect.signature(kind.forward).parameters
    return tuple(name for name, argument in parameters.items() if argument.kind is not argument.VAR_KEYWORD)[1:]


def argument_names(module: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names by which a model takes inputs with these names; `()` for a module that is no such model."""
    return _argument_names(_kind(model_in(module) or module), names)


def _kind(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


@functools.lru_cache
def _of_transformers(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "transformers" for base in kind.__mro__)


@functools.lru_cache
def _argument_names(kind: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    if not is_model(kind):
        return ()
    arguments = names_of_arguments(kind)
    unknown = [name for name in names if name not in arguments]
    if not unknown:
        return names
    if len(names) == 1:  # A column may have any name.
        return (getattr(kind, "main_input_name", arguments[0]),)
    hint = f"name the input columns, or what preprocess returns, as its arguments: {', '.join(arguments)}"
    raise ModuleError(f"forward of {kind.__qualname__} has no argument {unknown[0]!r}", hint=hint, param="module")
