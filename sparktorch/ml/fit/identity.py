"""Texts of Params that are the same in every process and differ where the values do: a training is known by them."""

from __future__ import annotations

import copyreg
import dis
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from sparktorch.base.config import INITIAL_WEIGHTS
from sparktorch.base.imports import import_path
from sparktorch.base.moved import earlier_name
from sparktorch.base.redact import is_secret
from sparktorch.model.trained_module import TrainedModule

__all__ = ["described"]

_CHECKPOINTED = ("module", "moduleParams")
# These attributes are torch's; recurrent layers list their parameters in them once more.
_SKIPPED = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}


def described(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns a text for each value: literal, by name if it can be imported, else by a digest of its contents.

    A script may draw the weights of its module anew each time it runs, and a checkpoint has them: their digest stands
    apart, under `INITIAL_WEIGHTS`.
    """
    weights: list[str] = []
    texts = {}
    for name, value in values.items():
        texts[name] = _Contents(weights if name in _CHECKPOINTED else None).text(value, name)
    if weights:
        texts[INITIAL_WEIGHTS] = _digest("".join(weights).encode())
    return texts


class _Contents:
    """Describes a value; digests of a module's weights go into `weights`, or count like all else without it."""

    def __init__(self, weights: list[str] | None) -> None:
        self._weights = weights
        self._texts: dict[int, tuple[Any, str]] = {}  # It holds the values, so that no other one gets their ids.

    def text(self, value: Any, name: object = "") -> str:
        """Returns the text of a value, of secrets a digest; a `name` such as "hf_token" is that of a secret."""
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key}: {self.text(item, key)}" for key, item in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(self.text(item, name) for item in value) + "]"
        if is_secret(value, name):
            return f"*** (sha256 {_digest(repr(value).encode())[:16]})"
        if isinstance(value, str) and value.startswith("sparktorch.") and ":" in value:
            module, _, path = value.partition(":")
            return repr(f"{earlier_name(module)}:{path}")
        if isinstance(value, str | int | float | bool | None):
            return repr(value)
        if id(value) not in self._texts:
            kind = str(getattr(value, "__qualname__", type(value).__qualname__))
            self._texts[id(value)] = value, kind  # A value that holds itself is known by its kind within itself.
            if import_path(value) is not None:
                text = f"{kind} (module {earlier_name(value.__module__)})"
            else:
                contents = self._contents(value)
                text = kind if contents is None else f"{kind} (sha256 {_digest(self.text(contents).encode())[:16]})"
            self._texts[id(value)] = value, text
        return self._texts[id(value)][1]

    def _contents(self, value: Any) -> Any:
        """Returns what a value consists of; `None` if it cannot be looked into."""
        match value:
            case bytes() | bytearray():
                return _digest(value)
            case torch.Tensor():
                return _tensor(value)
            case np.ndarray() if not value.dtype.hasobject:
                return [value.dtype.str, value.shape, _digest(value.tobytes())]
            case TrainedModule() if value.weights:
                return [replace(value, weights=b""), self._weight(value.weights)]
            case nn.Module():
                return self._module(value)
            case set() | frozenset():
                return sorted(map(self.text, value))
        return _code(value)

    def _module(self, module: nn.Module) -> Any:
        unsaved_names = module._non_persistent_buffers_set
        attributes = {name: value for name, value in vars(module).items() if name not in _SKIPPED}
        saved = {name: buffer for name, buffer in module._buffers.items() if name not in unsaved_names}
        saved |= module._parameters
        shapes: dict[str, Any] = {}
        weights: dict[str, Any] = {}
        for name, tensor in saved.items():
            shapes[name] = None if tensor is None else [str(tensor.dtype), tensor.shape, tensor.requires_grad]
            weights[name] = None if tensor is None else self._weight(tensor)
        unsaved = {name: module._buffers[name] for name in sorted(unsaved_names)}
        return [type(module), attributes, shapes, weights, unsaved, module._modules]

    def _weight(self, value: Any) -> Any:
        """Returns a weight, or notes it as one that a checkpoint has."""
        if self._weights is None:
            return value
        self._weights.append(self.text(value))
        return None


def _code(value: Any) -> Any:
    """Returns what functions and classes consist of, and what pickle takes of all else."""
    match value:
        case FunctionType():
            code, namespace = value.__code__, value.__globals__
            used_globals = {name: namespace[name] for name in _globals(code) if name in namespace}
            return [code, value.__defaults__, value.__kwdefaults__, value.__closure__, used_globals]
        case CellType():
            return None if value == CellType() else [value.cell_contents]
        case CodeType():  # The file and its lines are left out, because code may move.
            return [value.co_code, value.co_consts, value.co_names, value.co_varnames]
        case type():
            members = {
                name: member
                for name, member in vars(value).items()
                if name[:2] != "__" or isinstance(member, FunctionType)
            }
            return [value.__bases__, members]
        case staticmethod() | classmethod():
            return [value.__func__]
        case property():
            return [value.fget, value.fset, value.fdel]
        case ModuleType():
            return value.__name__
    return _reduced(value)


def _tensor(tensor: torch.Tensor) -> Any:
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    raw = b"" if tensor.is_meta else dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype), str(tensor.layout), tensor.shape, _digest(raw)]


def _globals(code: CodeType) -> list[str]:
    """Returns the names that code looks up among the globals, and so do the functions within it."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(_globals(constant))
    return sorted(names)


def _reduced(value: Any) -> Any:
    """Returns what pickle would take an object apart into."""
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        parts = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:  # An object that holds a lock, a file, or code of its own raises any kind of error.
        return None
    if isinstance(parts, str):
        return parts
    # The fourth and fifth part are iterators, over items of lists and dicts.
    return [*parts[:3], *([*items] for items in parts[3:5] if items is not None)]


def _digest(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()
