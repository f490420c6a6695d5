"""Functions that take the place of a callback that nobody needs."""

from __future__ import annotations

from typing import Any

__all__ = ["never", "no_op"]


def no_op(*_: Any) -> None:
    """Does nothing, with any arguments."""


def never(*_: Any) -> bool:
    """Returns `False`, with any arguments."""
    return False
