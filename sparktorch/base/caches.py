"""Tensors without values in the caches of functions, which would outlive the module that was made or called so."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves

from sparktorch.base.tape import is_fake

__all__ = ["keeping_no_fakes"]

_CACHE = type(functools.lru_cache(lambda: None))


@contextmanager
def keeping_no_fakes() -> Iterator[None]:
    """Context after which no cache of `functools` has tensors without values: its callers get real ones.

    It looks at all objects, also at those that are exempt from collections, which they are no longer then. What a
    forked process looks at becomes memory of its own.
    """
    try:
        yield
    finally:
        gc.unfreeze()
        for cache in [found for found in gc.get_objects() if type(found) is _CACHE]:
            if any(map(_lacks_values, tree_leaves(gc.get_referents(cache)))):
                cache.cache_clear()


def _lacks_values(leaf: object) -> bool:
    return is_fake(leaf) or (isinstance(leaf, torch.Tensor) and leaf.is_meta)
