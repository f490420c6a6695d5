"""Scores of equal rows are sent once, with the sum of their weights."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparktorch.worker.held_out import _counted


@pytest.mark.parametrize(
    ("weights", "counted"),
    [
        ([1.0, 2.0, 3.0], [(0.0, 3.0), (1.0, 3.0)]),
        ([-1.0, 2.0, 3.0], [(0.0, -1.0), (0.0, 2.0), (1.0, 3.0)]),  # each for the evaluator to refuse
    ],
)
def test_equal_rows_are_counted_unless_a_weight_is_below_0(
    weights: list[float], counted: list[tuple[float, float]]
) -> None:
    found = _counted(pa.table({"label": [0.0, 0.0, 1.0], "weight": weights}), "weight")
    assert list(zip(*found.to_pydict().values(), strict=True)) == counted
