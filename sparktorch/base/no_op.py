"""Functions for the place of a callback that nobody needs."""

from __future__ import annotations

from typing import Any

__all__ = ["never", "no_op"]


def no_op(*_: Any) -> None:
    """Does nothing, whatever it gets."""


def never(*_: Any) -> bool:
    """Returns `False`, whatever it gets."""
    return False
