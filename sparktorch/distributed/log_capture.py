"""Captures the lines that a rank logs and prints, for the driver to show and for error messages."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

__all__ = ["KEPT_LINES", "LogCapture", "excerpt", "last_lines"]

KEPT_LINES = 100

_LONGEST_LINE = 2000
_LONGEST_TEXT = 100_000  # of an error: torch's store takes values of 8 MiB, and JSON needs up to 12 bytes a character

Line = tuple[int, str]  # level, as in `logging`, and text


class LogCapture:
    """Captures this process's log records from `level` on, and printed lines, which have the level `INFO`."""

    def __init__(self, level: int = logging.WARNING) -> None:
        """Takes the lowest level of log records to capture; `INFO` and above are always captured."""
        self.level = min(level, logging.INFO)
        self.paused = False
        self._lock = threading.Lock()
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self._new: deque[Line] = deque(maxlen=KEPT_LINES)
        self._lost = 0

    @contextmanager
    def overhearing(self) -> Iterator[None]:
        """Context that captures logs and prints; they still go where they went before."""
        root = logging.getLogger()
        before, handler = root.level, _Handler(self, self.level)
        aloud = None if root.handlers else logging.StreamHandler(sys.stderr)  # as `logging` does by default
        root.addHandler(handler)
        if aloud is not None:
            aloud.setLevel(before)
            root.addHandler(aloud)
        root.setLevel(min(before, self.level))
        try:
            with redirect_stdout(_Tee(sys.stdout, self)), redirect_stderr(_Tee(sys.stderr, self)):
                yield
        finally:
            root.setLevel(before)
            root.removeHandler(handler)
            if aloud is not None:
                root.removeHandler(aloud)

    def add(self, level: int, text: str) -> None:
        """Captures the lines of a text."""
        if self.paused:
            return
        with self._lock:
            for line in text.splitlines():
                short = line[:_LONGEST_LINE]
                self._last.append(short)
                self._lost += len(self._new) == KEPT_LINES
                self._new.append((level, short))

    def drain(self) -> tuple[list[Line], int]:
        """Returns the last `KEPT_LINES` lines since the previous call, and how many earlier ones were dropped."""
        with self._lock:
            lines, lost = list(self._new), self._lost
            self._new.clear()
            self._lost = 0
        return lines, lost

    def last(self) -> list[str]:
        """Returns the last captured lines, at most `KEPT_LINES`."""
        with self._lock:
            return list(self._last)


def last_lines(rank: int, lines: list[str]) -> str:
    """Returns a rank's last logged or printed lines under a heading; an empty string if there are none."""
    return "\n".join([f"The last lines of rank {rank}:", *lines, "", ""]) if lines else ""


def excerpt(text: str) -> str:
    """Returns a text, or the beginning and the end of one that is too long for the driver's store."""
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} more characters ...\n{text[-half:]}"


class _Handler(logging.Handler):
    def __init__(self, console: LogCapture, level: int) -> None:
        super().__init__(level)
        self._console = console
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.add(record.levelno, self.format(record))
        except Exception:  # the arguments do not fit the format string
            self.handleError(record)


class _Tee:
    """A stream whose lines are also captured."""

    def __init__(self, stream: TextIO, console: LogCapture) -> None:
        self._stream, self._console, self._begun = stream, console, ""

    def write(self, text: str) -> int:
        self._begun += text
        whole, newline, self._begun = self._begun.rpartition("\n")
        if newline:
            self._console.add(logging.INFO, whole)
        self._begun = self._begun.rpartition("\r")[2][-_LONGEST_LINE:]  # keeps a progress bar's last state only
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
