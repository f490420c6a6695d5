"""The most memory that a process has held."""

from __future__ import annotations

from sparktorch.distributed.os_memory import forget_peaks, peaks


def test_the_peak_is_that_since_it_was_last_forgotten() -> None:
    hoard = bytearray(b"x" * 300_000_000)
    high = peaks("cpu")
    del hoard
    forget_peaks("cpu")
    low = peaks("cpu")
    assert low.keys() == {"peak_memory"}
    assert high["peak_memory"] - low["peak_memory"] > 250_000_000
