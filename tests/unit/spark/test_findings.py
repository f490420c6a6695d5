"""Findings become JSON, advice, warnings and errors."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace

import pytest

from sparktorch.errors import ClusterError
from sparktorch.spark.checks.findings import Finding, refuse

FINE = Finding(check="slots", status="ok", found="4 slots")
DOUBTFUL = Finding(
    check="shared-memory", status="warning", found="/dev/shm has 64 MiB free", where={"host": "a"}, hint="give it more"
)
FATAL = Finding(
    check="speculation", status="failure", found="speculation is on", setting="spark.speculation", value="false"
)


def test_a_finding_has_the_same_keys_whatever_it_says() -> None:
    for finding in (FINE, DOUBTFUL, FATAL):
        form = json.loads(json.dumps(asdict(finding)))
        assert list(form) == ["check", "status", "found", "where", "setting", "value", "hint"]
        assert Finding(**form) == finding


def test_warnings_are_logged_and_the_first_failure_raised(caplog: pytest.LogCaptureFixture) -> None:
    later = Finding(check="slots", status="failure", found="no slots")
    with caplog.at_level(logging.WARNING, "sparktorch"), pytest.raises(ClusterError) as caught:
        refuse([FINE, DOUBTFUL, FATAL, later])
    assert str(caught.value) == "speculation is on\n  -> set spark.speculation=false [ST-SPECULATION]"
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/shm has 64 MiB free [host=a]\n  -> give it more [ST-SHARED-MEMORY]"
    ]


def test_a_warning_of_many_places_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    there = [replace(DOUBTFUL, where={"host": f"host-{number}"}) for number in range(1000)]
    with caplog.at_level(logging.WARNING, "sparktorch"):
        refuse([*there, replace(DOUBTFUL, found="another")])
    first, second = (record.getMessage() for record in caplog.records)
    assert "[host=host-0]" in first
    assert first.endswith("... and in 999 other places")
    assert second.startswith("another")
