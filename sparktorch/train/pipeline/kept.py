"""What the parts of a module above its layers keep besides tensors: numbers that count, and what may not change."""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn

from sparktorch.errors import ModuleError

__all__ = ["Changes", "attributes", "check_attributes", "checksum", "equal", "is_plain", "kept_by", "take_attributes"]

_ABSENT = object()
_PLAIN = (bool, int, float, str, type(None), Enum, torch.dtype)
_OF_TORCH = vars(nn.Module()).keys() - {"training"}

_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_MOST_ENTRIES = 1000  # that are looked at in each pass
_BITS = 30

# A part, one of its attributes, and the keys within that, if it is a list or dict.
Place = tuple[Any, ...]


def kept_by(module: nn.Module, layers: Collection[str], *, functions: bool = False) -> dict[Place, Any]:
    """Returns what the parts above the layers keep besides what torch does, also in lists and dicts.

    Args:
        module: The module.
        layers: Names of the layers.
        functions: Whether attributes that are functions are among it.
    """
    return {
        (path, name, *keys): leaf
        for path, part in _above(module, layers)
        for name, value in vars(part).items()
        if name not in _OF_TORCH and (functions or not callable(value))
        for keys, leaf in _leaves(value)
    }


def attributes(module: nn.Module, layers: Collection[str]) -> dict[Place, Any]:
    """Returns the numbers, texts and flags among what the parts above the layers keep."""
    return {place: value for place, value in kept_by(module, layers).items() if is_plain(value)}


def take_attributes(module: nn.Module, source: nn.Module, layers: Collection[str]) -> None:
    """Gives the parts above the layers the numbers, texts and flags that those of another module keep."""
    parts = dict(_above(module, layers))
    for path, part in _above(source, layers):
        own = vars(parts[path])
        for name, value in vars(part).items():
            if name not in _OF_TORCH and not callable(value):
                taken = _taken(own.get(name, _ABSENT), value)
                if taken is not _ABSENT:
                    own[name] = taken


def check_attributes(kind: str, before: Mapping[Place, Any], after: Mapping[Place, Any]) -> None:
    """Refuses attributes that a forward pass sets or changes, as a recording is not called again.

    Args:
        kind: Name of the module's class.
        before: What its parts kept.
        after: What they keep.

    Raises:
        ModuleError: There are some.
    """
    for place in [*after, *before]:
        if not equal(before.get(place, _ABSENT), after.get(place, _ABSENT)):
            path, name, *keys = place
            raise ModuleError(
                f"the forward pass of {kind} {'changes' if keys else 'sets'} attribute {name!r} of "
                f"{path or 'the module'}, and a pipeline records what is computed above its layers once",
                hint="return what the loss needs, set it in a part without parts of its own, or divide the module with "
                "strategyParams.shard",
                param="module",
            )


class Changes:
    """Tells whether the numbers, texts and flags of a module have changed to the same in all ranks of a pipeline.

    And whether all have recorded the same forward pass, which one has not that keeps the time, or what its host has.
    """

    def __init__(self, module: nn.Module, layers: Collection[str]) -> None:
        """Takes a module and the names of its layers; what it keeps now may differ between ranks, as a path may."""
        self._module, self._layers = module, layers
        self._first = kept_by(module, layers, functions=True)

    def bits(self, recorded: int) -> int:
        """Returns a checksum of what has changed, and its complement behind it: ranks' "or" of both shows others.

        Args:
            recorded: The checksum of this rank's last recording.

        Raises:
            ModuleError: An attribute is another object, which a recording does not know.
        """
        kept, texts = kept_by(self._module, self._layers, functions=True), list[str]()
        for place in kept.keys() | self._first.keys():
            before, now = self._first.get(place, _ABSENT), kept.get(place, _ABSENT)
            if equal(before, now):
                continue
            if now is _ABSENT or is_plain(now):
                texts.append(_text(place, now))
            elif before is not _ABSENT:
                path, name, *_ = place
                raise ModuleError(
                    f"attribute {name!r} of {path or 'the module'} is another object than when the training began, and "
                    "a pipeline follows changes of numbers, texts, flags, dtypes and members of enums only",
                    hint="let a number decide which one is used, or divide the module with strategyParams.shard",
                    param="callbacks",
                )
        number = checksum([*sorted(texts), str(recorded)]) % (1 << _BITS)
        return number | (number ^ ((1 << _BITS) - 1)) << _BITS

    @staticmethod
    def check(bits: int) -> None:
        """Refuses other checksums.

        Args:
            bits: Those of all ranks, combined by "or".

        Raises:
            ModuleError: Ranks have other ones.
        """
        if bits & (bits >> _BITS):
            raise ModuleError(
                "the numbers, texts and flags that the module keeps have changed in some ranks of a pipeline only, or "
                "to others, or its forward pass computes with numbers that are others in other ranks",
                hint='change them to the same in all ranks, as a Callback does with ranks = "all"; keep what a '
                "training step counts outside of the module",
                param="callbacks",
            )


def checksum(texts: Iterable[str]) -> int:
    """Returns a number of 32 bits, the same in all processes."""
    return zlib.crc32("\n".join(texts).encode(errors="backslashreplace"))


def _text(place: Place, value: Any) -> str:
    """Returns an attribute and its value as text that other processes have, too, so without other keys of dicts."""
    keys = list(filter(is_plain, place))
    return f"{keys} {'is absent' if value is _ABSENT else repr(value)}"


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a flag, a dtype, a member of an enum or `None`."""
    return isinstance(value, _PLAIN)


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same; tensors and arrays are if they are one object."""
    if one is other or any(isinstance(value, torch.Tensor | np.ndarray) for value in (one, other)):
        return one is other
    try:
        return bool(one == other)
    except Exception:
        return False


def _above(module: nn.Module, layers: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Returns the module and its parts but for the layers and what is in them, by path."""
    left = [("", module)]
    while left:
        path, part = left.pop()
        yield path, part
        children = [(f"{path}.{name}" if path else name, child) for name, child in part.named_children()]
        left.extend((here, child) for here, child in children if here not in layers)


def _leaves(value: Any, within: tuple[int, ...] = ()) -> Iterator[tuple[Place, Any]]:
    """Returns what is in a list, dict or the like, by its keys there; another value alone, without any.

    Args:
        value: The value; of a large one, such as a vocabulary, its size counts only.
        within: What it is in, which may be in it again.
    """
    if not isinstance(value, _CONTAINERS) or id(value) in within:
        yield (), value
        return
    yield ("",), f"{type(value).__name__} of {len(value)}"  # an empty one has a leaf, too
    if len(value) > _MOST_ENTRIES:
        yield (), value
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in ((each, each) for each in value) if isinstance(value, set | frozenset) else pairs:
        for keys, leaf in _leaves(each, (*within, id(value))):
            yield (key, *keys), leaf


def _taken(own: Any, value: Any, within: tuple[int, ...] = ()) -> Any:
    """Returns a value, but for what is not plain, as the own one has it; others may have its lists and dicts, too."""
    if is_plain(value):
        return value
    if id(value) in within:
        return own
    within = (*within, id(value))
    if isinstance(value, dict) and isinstance(own, dict):
        taken = {key: _taken(own.get(key, _ABSENT), each, within) for key, each in value.items()}
        own.clear()
        own.update((key, each) for key, each in taken.items() if each is not _ABSENT)
    elif isinstance(value, list) and isinstance(own, list):
        pairs = zip_longest(own[: len(value)], value, fillvalue=_ABSENT)
        own[:] = [each for each in (_taken(one, other, within) for one, other in pairs) if each is not _ABSENT]
    elif all(is_plain(leaf) for _, leaf in _leaves(value)):
        return copy.deepcopy(value)
    elif isinstance(value, tuple) and isinstance(own, tuple) and len(own) == len(value):
        inner = [_taken(one, other, within) for one, other in zip(own, value, strict=True)]
        return own._make(inner) if hasattr(own, "_make") else tuple(inner)
    return own
