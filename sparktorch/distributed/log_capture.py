"""Captures the lines that a rank logs and prints, for the driver to show and for error messages."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

__all__ = ["KEPT_LINES", "LogCapture", "excerpt", "last_lines"]

KEPT_LINES = 100

_LONGEST_LINE = 2000
# The most characters in a text of an error. Torch's store takes values of 8 MiB, and JSON needs up to 12 bytes for a
# character.
_LONGEST_TEXT = 100_000

# Log records have this attribute where they are captured; it says whether the driver alone shows them.
_BY_DRIVER = "shown_by_the_driver"

# A line has a level, as in `logging`, and a text.
Line = tuple[int, str]


class LogCapture:
    """Captures this process's log records from `level` on, and printed lines, which have the level `INFO`.

    Attributes:
        level: The lowest level of log records that are captured.
        driver_level: The level from which on the driver shows lines.
        shared: Whether this process writes where the driver does: then it does not write what the driver shows.
        paused: Whether no lines are captured for now.
    """

    def __init__(self, level: int = logging.WARNING, *, shared: bool = False) -> None:
        """Takes the level from which on the driver shows lines; `INFO` and above are always captured."""
        self.level = min(level, logging.INFO)
        self.driver_level = level
        self.shared = shared
        self.paused = False
        self._lock = threading.Lock()
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        # The lines since the last `drain`, and the number of lines that `_unsent` has dropped since then.
        self._unsent: deque[Line] = deque(maxlen=KEPT_LINES)
        self._lost = 0

    @contextmanager
    def overhearing(self) -> Iterator[None]:
        """Context that captures logs and prints; they still go where they went before, unless the driver shows them."""
        root = logging.getLogger()
        level_before = root.level
        handler = _Handler(self, self.level)
        # `logging` writes to stderr as long as there is no handler. The handler of this capture would end that.
        stderr_handler = None if root.handlers else logging.StreamHandler(sys.stderr)
        root.addHandler(handler)
        if stderr_handler is not None:
            stderr_handler.setLevel(level_before)
            stderr_handler.addFilter(_is_for_this_process)
            root.addHandler(stderr_handler)
        root.setLevel(min(level_before, self.level))
        try:
            out, err = _Tee(sys.stdout, self), _Tee(sys.stderr, self)
            with closing(out), closing(err), redirect_stdout(out), redirect_stderr(err):
                yield
        finally:
            root.setLevel(level_before)
            root.removeHandler(handler)
            if stderr_handler is not None:
                root.removeHandler(stderr_handler)

    def add(self, level: int, text: str) -> bool:
        """Captures the lines of a text; returns whether the driver alone shows them."""
        if self.paused:
            return False
        lines = [line[:_LONGEST_LINE] for line in text.splitlines()]
        with self._lock:
            self._last.extend(lines)
            by_driver = self.shared and level >= self.driver_level
            # The driver gets the last lines only. Where lines would be lost, this process shows the whole text itself.
            if by_driver and len(self._unsent) + len(lines) > KEPT_LINES:
                return False
            for line in lines:
                if len(self._unsent) == KEPT_LINES:  # The deque drops its first line.
                    self._lost += 1
                self._unsent.append((level, line))
        return by_driver

    def another(self) -> LogCapture:
        """Returns a capture without lines, with the same levels."""
        return LogCapture(self.driver_level, shared=self.shared)

    def drain(self) -> tuple[list[Line], int]:
        """Returns the last `KEPT_LINES` lines since the previous call, and how many earlier ones were dropped."""
        with self._lock:
            lines, lost = list(self._unsent), self._lost
            self._unsent.clear()
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


def _is_for_this_process(record: logging.LogRecord) -> bool:
    """Returns whether this process shows a log record, because the driver does not."""
    return not getattr(record, _BY_DRIVER, False)


class _Handler(logging.Handler):
    """Captures log records, and marks those that the driver alone shows."""

    def __init__(self, capture: LogCapture, level: int) -> None:
        super().__init__(level)
        self._capture = capture
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            setattr(record, _BY_DRIVER, self._capture.add(record.levelno, self.format(record)))
        except Exception:  # The arguments do not fit the format string.
            self.handleError(record)


class _Tee:
    """A stream whose lines are also captured."""

    def __init__(self, stream: TextIO, capture: LogCapture) -> None:
        self._stream = stream
        self._capture = capture
        # The beginning of a line that is not captured yet.
        self._begun = ""
        # Whether lines are written only once they end: a line that the driver shows is not written at all.
        self._writes_whole_lines = capture.shared and capture.driver_level <= logging.INFO
        # The beginning of a line that is not written yet.
        self._unwritten = ""
        # Whether the line is a progress bar, which is written before it ends.
        self._is_bar = False

    def write(self, text: str) -> int:
        self._begun += text
        if "\r" in text:
            self._is_bar = True
        whole_lines, newline, self._begun = self._begun.rpartition("\n")
        by_driver = bool(newline) and self._capture.add(logging.INFO, whole_lines)
        self._begun = self._begun.rpartition("\r")[2][-_LONGEST_LINE:]  # Only the last state of a progress bar counts.
        if self._writes_whole_lines and not self._is_bar:
            lines, _, self._unwritten = (self._unwritten + text).rpartition("\n")
            self._stream.write("" if by_driver else f"{lines}{newline}")
        else:
            self._stream.write(self._unwritten + text)
            self._unwritten = ""
        if newline:
            self._is_bar = False
        return len(text)

    def close(self) -> None:
        """Writes the beginning of a line that has no end yet; the stream itself stays open.

        From then on, all is written at once: handlers of libraries may keep this object for longer than the driver
        shows lines.
        """
        self._stream.write(self._unwritten)
        self._unwritten = ""
        self._writes_whole_lines = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
