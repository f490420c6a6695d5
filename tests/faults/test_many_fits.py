"""Fits one after another, many at once, and two at once where there is room for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.programs import run_python

# Per fit. Of each rank's tensors, of a connection or of a module, one a fit would be more.
MEBIBYTES = {"driver": 0.15, "workers": 0.15, "jvm": 0.5}
OBJECTS = 2
# Once: a Python worker that Spark has started anew shares other pages with the process that it was forked from.
ONCE = 10


@pytest.mark.parametrize(("fits", "rest"), [(20, 0), pytest.param(200, 70, marks=pytest.mark.slow)])
def test_fits_leave_nothing_behind_and_do_not_disturb_each_other(fits: int, rest: int, tmp_path: Path) -> None:
    out = run_python(
        tmp_path, "-m", "tests.faults.programs.many_fits", str(fits), str(rest), str(tmp_path), seconds=280
    )
    report = json.loads(out.splitlines()[-1])
    print(json.dumps(report))
    before, after = report["before"], report["after"]
    for earlier, later, count in ((before, after, fits), (*report["held"], 5 * fits)):
        for name in ("driver", "workers"):
            assert later[name]["processes"] == earlier[name]["processes"], report
            assert later[name]["threads"] == earlier[name]["threads"], report
            assert later[name]["files"] == earlier[name]["files"], report
            assert later[name]["memory"] - earlier[name]["memory"] < MEBIBYTES[name] * count + ONCE, report
        assert later["driver"]["objects"] - earlier["driver"]["objects"] < OBJECTS * count, report
    # Of Spark's own: its pools keep idle threads for a minute, its status keeps the last 1,000 jobs.
    assert after["jvm"]["files"] - before["jvm"]["files"] < 20, report
    assert after["jvm"]["heap"] - before["jvm"]["heap"] < MEBIBYTES["jvm"] * fits, report
    if rest:
        assert after["jvm"]["threads"] - before["jvm"]["threads"] < 20, report
    assert report["threads"] == []
