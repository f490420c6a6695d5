"""What torch logs beside an error or a choice that it has told already."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet"]


@contextmanager
def quiet(name: str, level: int = logging.CRITICAL) -> Iterator[None]:
    """Context in which the logger of that name, and those below it, show records of that level and above only."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
