"""The best columns of each row, exactly, and of equal scores the first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparktorch.tasks.recommender.top_k import NOTHING, block_rows, top_k


@pytest.mark.parametrize("columns", [1, 5, 63, 64, 65, 1_000])
@pytest.mark.parametrize("k", [1, 10, 200])
def test_lists_are_those_of_a_stable_sort_however_many_scores_are_equal(columns: int, k: int) -> None:
    draw = torch.Generator().manual_seed(columns)
    for scores in (
        torch.randn(20, columns, generator=draw),
        torch.randint(-2, 3, (20, columns), generator=draw).float() * -0.0,
        torch.randint(-2, 3, (20, columns), generator=draw).float(),
        torch.full((20, columns), NOTHING),
    ):
        expected = np.argsort(-scores.numpy(), axis=1, kind="stable")[:, :k]
        found, places = top_k(scores, k)
        np.testing.assert_array_equal(places, expected)
        np.testing.assert_array_equal(found, np.take_along_axis(scores.numpy(), expected, 1))


def test_a_block_has_a_row_at_least() -> None:
    assert block_rows(10**9) == 1
    assert block_rows(1_000) * 1_000 * 4 <= 2 << 20
