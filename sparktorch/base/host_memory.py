"""The host's memory under the C library's allocator, which keeps what was freed between what is still used."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["given_back", "trim"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_LARGEST = 32 << 20  # to which glibc raises the second by itself, and twice of it the first


def trim() -> None:
    """Gives freed memory back to the system, as far as the C library can."""
    call = _function("malloc_trim")
    if call is not None:
        call(0)


@contextmanager
def given_back(least: int) -> Iterator[None]:
    """Context in which blocks of at least so many bytes are given back to the system as soon as they are freed.

    glibc keeps blocks of up to 32 MiB for later ones, and often cannot use them: torch asks for aligned memory, which a
    freed block of the same size does not hold. Ranks that gather parameters, and free them again, grow by several times
    the model. A block of one's own costs the time to map it.

    Args:
        least: Size in bytes.
    """
    call = _function("mallopt")
    if call is not None and least < _LARGEST:
        call(_TRIM_THRESHOLD, 2 * _LARGEST)
        call(_MMAP_THRESHOLD, least)
    try:
        yield
    finally:
        if call is not None and least < _LARGEST:
            call(_MMAP_THRESHOLD, _LARGEST)


def _function(name: str) -> Callable[..., Any] | None:
    """Returns a function of the C library, `None` if it is not glibc."""
    found: Callable[..., Any] | None = getattr(ctypes.CDLL(None), name, None)
    return found
