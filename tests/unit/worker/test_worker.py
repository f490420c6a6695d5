"""What a rank tells of its groups, counts of scores, and undoes of a user's function."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.data.columns import GROUP, ORDER, VALIDATION, Window
from sparktorch.data.dataset.reader import read_shard
from sparktorch.distributed.client import Client
from sparktorch.distributed.store import connect, host_store
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker.held_out import _merge_equal_rows
from sparktorch.worker.peers import warn_of_groups
from sparktorch.worker.placement import assign_positions
from sparktorch.worker.torchrun import left_as_before, torchrun_environment
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
    warn_of_groups(table.columns.groups, peers, cast(Any, client))
    assert ["1 of 3 workers has nothing to train" in text for text in client.warnings] == [True] * warned


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
    found = _merge_equal_rows(pa.table({"label": [0.0, 0.0, 1.0], "weight": weights}), "weight")
    assert list(zip(*found.to_pydict().values(), strict=True)) == counted


def test_environment_paths_and_torchs_defaults_are_as_before_also_after_an_error(tmp_path: object) -> None:
    def state() -> tuple[object, ...]:
        defaults = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
        return dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv), defaults

    def litter() -> None:
        with left_as_before():
            os.environ["LITTER"] = "1"
            del os.environ["PATH"]
            os.chdir(str(tmp_path))
            sys.path.insert(0, "/nowhere")
            sys.argv = ["other"]
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            torch.set_grad_enabled(False)
            raise ZeroDivisionError

    before = state()
    with pytest.raises(ZeroDivisionError):
        litter()
    assert state() == before
    assert torch.ones(1).device.type == "cpu"


@pytest.mark.parametrize(("device", "index"), [("cuda:5", "5"), ("xpu:0", "0"), ("cpu", "1")])
def test_a_script_that_takes_the_device_of_its_local_rank_takes_that_of_its_rank(device: str, index: str) -> None:
    server, port = host_store("127.0.0.1")
    world = World(local_rank=1, local_size=2, address="127.0.0.1", device=device)
    with torchrun_environment(world, Client(partial(connect, "127.0.0.1", port, "fit"), world)):
        assert os.environ["LOCAL_RANK"] == index
    assert "LOCAL_RANK" not in os.environ
    del server
