"""A module's own attributes: the plain values that a checkpoint holds, and how to leave all of them as they were."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["plain_attributes", "unchanged"]

_PLAIN = (type(None), bool, int, float, str)
_LISTS, _OTHERS = (list, deque), (dict, defaultdict, OrderedDict, set)
_OF_TORCH = frozenset(vars(nn.Module()))  # parameters, buffers, parts, hooks and the mode


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns copies of a module's own attributes that are numbers, strings, or lists and dicts of them."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: copy.deepcopy(value) for name, value in own.items() if name != "training" and _is_plain(value)}


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context after which modules have their attributes of before, and lists, dicts and sets their items.

    Parameters, buffers, parts, hooks and tensors that are changed in place are left as they are.
    """
    before = [(vars(module), _own(module)) for module in modules]
    held: dict[int, tuple[Any, Any]] = {}
    for _, own in before:
        _hold(list(own.values()), held)
    try:
        yield
    finally:
        for now, own in before:
            for name in now.keys() - own.keys() - _OF_TORCH:
                del now[name]
            now |= own
        for container, items in held.values():
            container.clear()
            (container.extend if type(container) in _LISTS else container.update)(items)


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _hold(values: Iterable[Any], held: dict[int, tuple[Any, Any]]) -> None:
    """Adds the lists, dicts and sets among values, and in each other, with copies of them."""
    for value in values:
        if type(value) in (*_LISTS, *_OTHERS) and id(value) not in held:
            held[id(value)] = value, copy.copy(value)
            _hold(value.values() if isinstance(value, dict) else value, held)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    return type(value) in _PLAIN
