"""What a rank prints and logs is shown by the driver or where the rank writes, in a local session by one of them."""

from __future__ import annotations

import logging
import sys

import pytest

from sparktorch.distributed.log_capture import KEPT_LINES, LogCapture

_LOG = logging.getLogger("of.a.rank")


def of_rank(capture: LogCapture) -> None:
    with capture.overhearing():
        print("printed")
        print("one", "line", end=" ")
        print("of two")
        sys.stdout.write("\r10 %")
        sys.stdout.write("\r20 %")
        sys.stdout.write("\n")
        _LOG.info("told")
        _LOG.warning("warned")
        print("without an end", end="")


@pytest.mark.parametrize(
    ("level", "shared", "out", "err"),
    [
        (logging.INFO, True, "\r10 %\r20 %\nwithout an end", ""),
        (logging.WARNING, True, "printed\none line of two\n\r10 %\r20 %\nwithout an end", ""),
        (logging.ERROR, True, "printed\none line of two\n\r10 %\r20 %\nwithout an end", "warned\n"),
        (logging.INFO, False, "printed\none line of two\n\r10 %\r20 %\nwithout an end", "warned\n"),
    ],
)
def test_a_line_that_the_driver_shows_is_written_nowhere_else_where_both_write_to_one_place(
    level: int,
    shared: bool,
    out: str,
    err: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a worker of Spark's
    capture = LogCapture(level, shared=shared)
    of_rank(capture)
    assert capsys.readouterr() == (out, err)
    lines = [text for _, text in capture.drain()[0]]
    assert lines == ["printed", "one line of two", "20 %", "INFO of.a.rank: told", "WARNING of.a.rank: warned"]
    assert capture.last() == lines


def test_a_handler_of_a_library_that_outlives_the_capture_still_writes_its_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LogCapture(logging.INFO, shared=True).overhearing():
        kept = logging.StreamHandler(sys.stderr)
        sys.stderr.write("begun")
    kept.emit(logging.LogRecord("library", logging.INFO, "", 0, "said later", None, None))
    assert capsys.readouterr().err == "begunsaid later\n"


def test_lines_that_are_too_many_for_the_driver_are_written_where_the_rank_writes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    capture = LogCapture(logging.INFO, shared=True)
    with capture.overhearing():
        for number in range(KEPT_LINES + 3):
            print(number)
    assert capsys.readouterr().out == "100\n101\n102\n"
    lines, lost = capture.drain()
    assert ([text for _, text in lines], lost) == ([*map(str, range(KEPT_LINES))], 0)
