"""Fake tensors where nothing can make them real: within the lists, objects and functions that a module holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from sparktorch.base.tape import is_fake
from sparktorch.errors import ModuleError

__all__ = ["check_references"]

_CLOSED = (type, ModuleType, torch.Tensor, torch._C.ScriptMethod, str, bytes, int, float, complex, type(None))


def check_references(module: nn.Module, names: Mapping[int, list[str]]) -> None:
    """Refuses fake tensors within other attributes of a module than those that hold parameters, buffers and parts.

    Args:
        module: The module.
        names: Names of its parameters and buffers, by the `id` of the tensor.

    Raises:
        ModuleError: An attribute holds one: in a container, an object, or what a function refers to.
    """
    # What has been compiled has the tables of the module that it was compiled from.
    tables = ((part, part._parameters, part._buffers, part._modules) for part in module.modules())
    seen: dict[int, Any] = {id(known): known for each in tables for known in each}
    for path, part in module.named_modules():
        for attribute, value in vars(part).items():
            own = attribute in ("_parameters", "_buffers", "_modules")
            own = own or (isinstance(part, nn.RNNBase) and attribute == "_flat_weights")
            if own or isinstance(value, torch.Tensor):
                continue
            if (held := _fake_within(value, seen)) is not None:
                what = f"the parameter {names[id(held)][0]!r}" if id(held) in names else "a tensor"
                raise ModuleError(
                    f"{f'{path}.{attribute}'.removeprefix('.')} holds {what} in a {type(value).__name__}",
                    hint="keep modules or names there, or register_buffer(...); or leave modelDir out",
                    param="module",
                )


def _fake_within(value: Any, seen: dict[int, Any]) -> torch.Tensor | None:
    """Returns a fake tensor that a value refers to; `seen` are values without, by `id`, which are kept alive."""
    todo = [value]
    while todo:
        found = todo.pop()
        if is_fake(found):
            held: torch.Tensor = found
            return held
        if id(found) not in seen and not isinstance(found, _CLOSED):
            seen[id(found)] = found
            todo.extend(_inside(found))
    return None


def _inside(value: Any) -> Iterator[Any]:
    """Yields what a value refers to; of a function, what it closes over and its defaults, but no globals."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from (value.__closure__, value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, CellType):
        with suppress(ValueError):  # it is empty yet
            yield value.cell_contents
    yield getattr(value, "__dict__", None)
    yield from _slots(value)


def _slots(value: Any) -> Iterator[Any]:
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            for slot in vars(kind).values():
                if isinstance(slot, MemberDescriptorType):
                    with suppress(AttributeError):  # it is not set
                        yield slot.__get__(value)
