"""A context without the log records by which torch repeats an error or a choice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

__all__ = ["quiet"]

_lock = Lock()
# By logger, the number of contexts that are open in all threads, and the level before the first of them.
_open: dict[str, tuple[int, int]] = {}


@contextmanager
def quiet(name: str, level: int = logging.CRITICAL) -> Iterator[None]:
    """Context in which the logger `name`, and the loggers below it, show only records of `level` and above."""
    logger = logging.getLogger(name)
    with _lock:
        contexts, before = _open.get(name, (0, logger.level))
        _open[name] = contexts + 1, before
        logger.setLevel(level)
    try:
        yield
    finally:
        with _lock:
            contexts, before = _open.pop(name)
            if contexts > 1:
                _open[name] = contexts - 1, before
            else:
                logger.setLevel(before)
