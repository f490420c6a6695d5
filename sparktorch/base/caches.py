"""Tensors without values in the caches of functions, which would outlive the module that was made or called so."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from sparktorch.base.tape import is_fake

__all__ = ["keeping_no_fakes"]

_CACHE = type(functools.lru_cache(lambda: None))
_met: WeakSet[Any] = WeakSet()  # caches, which a process may exempt from collections later


@contextmanager
def keeping_no_fakes() -> Iterator[None]:
    """Context after which no cache of `functools` has tensors without values: its callers get real ones.

    It looks at all objects but those that are exempt from collections; what a forked process looks at becomes memory of
    its own.
    """
    try:
        yield
    finally:
        _met.update(found for found in gc.get_objects() if type(found) is _CACHE)
        for cache in list(_met):
            if _has_fakes(cache):
                cache.cache_clear()


def _has_fakes(cache: Any) -> bool:
    """Whether a cache has tensors without values, also in lists, dicts and the like."""
    left, seen = gc.get_referents(cache), set[int]()
    while left:
        value = left.pop()
        if is_fake(value) or (isinstance(value, torch.Tensor) and value.is_meta):
            return True
        if isinstance(value, dict | list | tuple | set | frozenset) and id(value) not in seen:
            seen.add(id(value))
            left.extend(value.values() if isinstance(value, dict) else value)
    return False
