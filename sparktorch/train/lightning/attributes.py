"""The plain values among a module's own attributes, which a training may change."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

__all__ = ["plain_attributes"]

_PLAIN = (type(None), bool, int, float, str)


def plain_attributes(module: nn.Module, *, private: bool = False) -> dict[str, Any]:
    """Returns copies of a module's own attributes that are numbers, strings, or lists and dicts of them."""
    own = {name: value for name, value in vars(module).items() if private or not name.startswith("_")}
    return {name: copy.deepcopy(value) for name, value in own.items() if name != "training" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    return type(value) in _PLAIN
