"""The check of the tests that `make lint` runs."""

from __future__ import annotations

import ast
import runpy

from tests.support.programs import ROOT


def test_counts_of_what_is_never_scored_are_found_and_no_others() -> None:
    lines = runpy.run_path(str(ROOT / "scripts" / "check_tests.py"))["counts_of_nothing"]
    source = """
def test_something(model, frame):
    assert model.transform(frame).count() == 1
    scored = model.transform(frame).select("label")
    assert scored.limit(3).count() == 3
    few = scored.limit(3)
    assert few.count() == 3
    assert model.transform(dataset=frame, params={}).count() == 1
    assert frame.count() == model.transform(frame).groupBy("prediction").count().first()["count"]
    assert model.transform(frame).where("prediction = 1").count() == 1
    assert frame.select(F.transform("x", lambda x: x)).count() == 1
"""
    assert lines(ast.parse(source)) == [3, 5, 7, 8]
