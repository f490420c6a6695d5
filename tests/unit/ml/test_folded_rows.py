"""What ranks that hold rows leave to other jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparktorch.ml.tuning import folded_rows


@pytest.mark.parametrize(
    ("dynamic", "slots", "leaves"), [("TRUE", 2, True), ("True", 2, True), ("false", 2, False), ("false", 3, True)]
)
def test_other_jobs_find_slots_where_there_are_more_or_executors_may_come(
    dynamic: str, slots: int, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folded_rows, "slots", lambda _: slots)
    spark = SimpleNamespace(conf={"spark.dynamicAllocation.enabled": dynamic})
    held = SimpleNamespace(dataset=SimpleNamespace(sparkSession=spark), _pool=SimpleNamespace(facts=[{}, {}]))
    leaves_slots: Any = folded_rows.FoldedRows.leaves_slots
    assert leaves_slots.fget(held) == leaves
