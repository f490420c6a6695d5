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
    held = [{name: _items(value) for name, value in own.items()} for _, own in before]
    try:
        yield
    finally:
        for (now, own), items in zip(before, held, strict=True):
            for name in now.keys() - own.keys() - _OF_TORCH:
                del now[name]
            now |= {name: _restored(value, items[name]) for name, value in own.items()}


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _items(value: Any) -> Any:
    """Returns copies of lists, dicts and sets, also in each other; anything else as it is."""
    if type(value) not in (*_LISTS, *_OTHERS):
        return value
    found = copy.copy(value)
    if type(value) is not set:
        for place in range(len(found)) if type(value) in _LISTS else found:
            found[place] = _items(found[place])
    return found


def _restored(value: Any, items: Any) -> Any:
    if type(value) in (*_LISTS, *_OTHERS):
        value.clear()
        (value.extend if type(value) in _LISTS else value.update)(items)
    return value


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    return type(value) in _PLAIN
