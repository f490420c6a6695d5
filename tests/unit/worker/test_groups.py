"""What is told of groups that do not suit the workers or the windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.data.columns import GROUP, ORDER, VALIDATION, Window
from sparktorch.data.dataset.reader import read_shard
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker.held_rows import _warn_of_groups
from sparktorch.worker.placement import assign_positions
from tests.support.frames import Table
from tests.support.groups import grouped
from tests.support.nets import Score
from tests.support.ranks import train_job

WINDOW = Window(context=4, horizon=2, step=1)


class Told:
    """A client that keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def facts(table: Table) -> dict[str, Any]:
    """Returns what a rank tells the others of its rows."""
    shard = read_shard(table.batches(), table.columns)
    return {"rows": shard.rows, "validation": shard.validation_rows, "groups": shard.groups}


def placed(table: Table) -> None:
    """Places the rows of one rank."""
    job = train_job(table, Recipe(module=Score, loss="MSELoss"), TrainConfig(task="regression", patience=1))
    assign_positions(cast(Any, None), World(), job, [facts(table)], cast(Any, None))


def test_a_mark_of_less_than_a_horizon_is_told_apart_from_none() -> None:
    table = grouped([9], window=WINDOW, validated=True)
    for marked, says in ((0, "marks none"), (1, "marks no window's whole horizon")):
        with pytest.raises(ConfigError, match=f"column 'held_out' {says}"):
            placed(table.with_values(VALIDATION, table.arrays[ORDER] // 3600 >= 9 - marked))


def test_gaps_are_named_where_they_leave_no_window() -> None:
    table = grouped([30], window=replace(WINDOW, even=("bigint", "")))
    table = Table(table.arrays, replace(table.columns, drop_nulls=True))
    with pytest.raises(ColumnError, match="no group has 6 rows without a gap"):
        placed(table.take(table.arrays[ORDER] // 3600 % 5 != 4))
    with pytest.raises(ColumnError, match="no group has 6 rows, "):
        placed(table.take(table.arrays[ORDER] // 3600 < 5))


@pytest.mark.parametrize(("shares", "warned"), [([[0, 1], [2, 3], []], True), ([[0, 1], [2], [3]], False)])
def test_workers_without_groups_are_counted_in_a_warning(shares: list[list[int]], warned: bool) -> None:
    table, client = grouped([5, 5, 5, 5]), Told()
    number = np.unique(table.arrays[GROUP], return_inverse=True)[1]
    peers = [facts(table.take(np.isin(number, share))) for share in shares]
    assert table.columns.groups is not None
    _warn_of_groups(table.columns.groups, peers, cast(Any, client))
    assert ["1 of 3 workers has nothing to train" in text for text in client.warnings] == [True] * warned
