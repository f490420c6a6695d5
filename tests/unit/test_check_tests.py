"""The check of the tests that `make lint` runs."""

from __future__ import annotations

import ast
import runpy
from textwrap import indent
from typing import Any

import pytest

from tests.support.programs import ROOT

LINES: Any = runpy.run_path(str(ROOT / "scripts" / "check_tests.py"))["counts_of_nothing"]


@pytest.mark.parametrize(
    "source",
    [
        "assert model.transform(frame).count() == 1",
        "scored = model.transform(frame).select('label')\nassert scored.limit(3).count() == 3",
        "scored: DataFrame = model.transform(frame)\nassert scored.count() == 1",
        "assert frame.union(model.transform(frame)).count() == 2",
        "assert model.transform(frame).agg(F.count('*')).first()[0] == 1",
        "assert model.transform(frame).groupBy('label').count().collect()",
    ],
)
@pytest.mark.parametrize("scope", ["", "def test_it(model, frame):\n"])
def test_a_count_of_what_is_never_scored_is_found(source: str, scope: str) -> None:
    found = LINES(ast.parse(scope + indent(source, "    ") if scope else source))
    assert len(found) == 1


@pytest.mark.parametrize(
    "source",
    [
        "assert frame.count() == len(model.transform(frame).collect())",
        "rows = model.transform(frame).collect()\nassert frame.limit(len(rows)).count() == 1",
        "rows = model.transform(frame).toPandas()\nassert rows.count() == 1",
        "assert frame.select(F.transform('x', lambda x: x)).count() == 1",
        "plan = model.transform(frame)._jdf.toString()\nassert plan.count('Project') == 1",
        "assert model.transform(frame).agg(F.sum('prediction')).first()[0] == 1",
    ],
)
def test_what_scores_or_was_never_to_be_scored_is_let_through(source: str) -> None:
    assert LINES(ast.parse(source)) == []
