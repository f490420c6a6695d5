"""A user's loop in ranks: the batches, gradients and weights of an estimator's loop, checkpoints, refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sparktorch.base.config import CheckpointConfig, StorageConfig, TrainConfig
from sparktorch.data.columns import VALIDATION
from sparktorch.errors import SparkTorchError
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import called
from tests.dist.worker import loops
from tests.support.frames import Table
from tests.support.nets import Score
from tests.support.ranks import FunctionJob, control_server, run_on, run_ranks, train_job, train_on
from tests.support.reference import global_batches

WEIGHTED, PLAIN = Table.random(203, weighted=True, validated=True), Table.random(203)
CONFIG: dict[str, Any] = {"batch_size": 16, "epochs": 2, "seed": 5}


def job(table: Table, function: Callable[..., Any], *arguments: Any, **more: Any) -> FunctionJob:
    config = TrainConfig(**CONFIG, **more.pop("config", {}))
    return FunctionJob(
        columns=table.columns,
        config=config,
        max_imbalance=None,
        placeholder=table.batches()[0].slice(0, 1),
        function=partial(called, function, arguments, {}),
        **more,
    )


def trained(table: Table, ranks: int = 1, module: Any = Score, **config: Any) -> dict[str, torch.Tensor]:
    recipe = Recipe(module=module, optimizer_params={"weight_decay": 0.05}, learning_rate=3e-3)
    job = train_job(table, recipe, TrainConfig(**CONFIG, **config), placeholder=table.batches()[0].slice(0, 1))
    return train_on([part.batches() for part in table.parts(ranks)], job)[0]


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """The weights of a plain estimator's loop over the weighted rows."""
    return trained(WEIGHTED)


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("function", "ranks"), [(loops.wrapped, 1), (loops.wrapped, 3), (loops.by_hand, 1), (loops.by_hand, 3)]
)
def test_a_loop_with_three_changed_lines_ends_with_the_weights_of_the_estimator(
    function: Callable[..., Any], ranks: int, expected: dict[str, torch.Tensor]
) -> None:
    parts = [part.batches() for part in WEIGHTED.shuffled(seed=ranks).parts(ranks)]
    if ranks == 3:
        parts = [parts[0], [], parts[1] + parts[2]]  # a rank without rows
    close(run_on(parts, job(WEIGHTED, function))[0], expected)


def test_gradients_that_a_collective_averages_are_those_of_the_global_batch_in_every_rank() -> None:
    rows = PLAIN.by_key()
    parts = [rows.take(slice(0, 50)).batches(), rows.take(slice(50, None)).batches()]
    expected = trained(PLAIN)
    for found in run_on(parts, job(PLAIN, loops.mean_of_gradients)):
        close(found, expected)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("zero1", {}),
        ("zero3", {}),
        ("mesh", {"shard": 2}),
        ("mesh", {"tensor": 2}),
        ("localSGD", {}),
        ("parameterServer", {"staleness": 0}),
    ],
)
def test_a_wrapped_loop_trains_as_the_estimator_does_under_each_strategy(strategy: str, options: Any) -> None:
    config: dict[str, Any] = {"strategy": strategy, "strategy_params": options}
    parts = [part.batches() for part in WEIGHTED.parts(2)]
    close(run_on(parts, job(WEIGHTED, loops.wrapped, config=config))[0], trained(WEIGHTED, 2, **config))


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_ranks_see_the_rows_of_every_global_batch_once(kind: Any) -> None:
    parts = [part.batches() for part in WEIGHTED.parts(2)]
    first, second = run_on(parts, job(WEIGHTED, loops.batches, storage=StorageConfig(kind=kind, budget=1)))
    expected = global_batches(WEIGHTED, TrainConfig(**CONFIG))
    for epoch in range(2):
        for step in range(first["steps"]):
            rows = first["epochs"][epoch][step] + second["epochs"][epoch][step]
            number, part = next(expected)
            assert number == epoch
            assert sorted(rows) == sorted(part.x[:, 0].tolist())
    held_out = WEIGHTED.arrays[VALIDATION]
    values = WEIGHTED.arrays["x0"][:, 0]
    assert sorted(first["dataset"] + second["dataset"]) == sorted(values[~held_out].tolist())
    assert [first["rows"], second["rows"]] == [len(first["dataset"]), len(second["dataset"])]
    assert len(first["validation"]) == len(second["validation"])
    assert sorted(x for rank in (first, second) for _, rows in rank["validation"] for x in rows) == sorted(
        values[held_out].tolist()
    )


def test_a_loader_that_is_left_early_begins_anew() -> None:
    steps = list(range(-(-len(PLAIN) // CONFIG["batch_size"])))
    for found in run_on([part.batches() for part in PLAIN.parts(2)], job(PLAIN, loops.left_early)):
        assert found[0][:3] == [0, 1, 2]
        assert found[1:] == [steps] * 3


def checkpointed(folder: Path, *arguments: Any, owner: str = "me", restart: int = 0) -> FunctionJob:
    checkpoint = CheckpointConfig(directory=str(folder / "saved"), owner=owner, restart=restart)
    return job(WEIGHTED, loops.resumable, folder, *arguments, checkpoint=checkpoint)


@pytest.mark.parametrize(("ranks", "save_at", "deep"), [(3, 8, True), (2, 10, False)])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path, ranks: int, save_at: int, deep: bool) -> None:
    parts = [part.batches() for part in WEIGHTED.parts(ranks)]
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    expected = run_on(parts, checkpointed(calm, -1, save_at, 0, deep))
    with control_server() as server:
        ended = run_ranks(server, parts, checkpointed(killed, 1, save_at, 17, deep))
    assert ended[1].exitcode == -9
    found = run_on(parts, checkpointed(killed, 1, save_at, 17, deep, restart=1))
    assert all(rank["resumed"] for rank in found)
    for mine, theirs in zip(found, expected, strict=True):
        close(mine["state"], theirs["state"], atol=0.0)
        assert (mine["steps"], mine["seen"]) == (theirs["steps"], theirs["seen"])


def test_a_run_goes_on_with_fewer_ranks_but_without_what_each_rank_saved(tmp_path: Path) -> None:
    with control_server() as server:
        run_ranks(server, [part.batches() for part in WEIGHTED.parts(3)], checkpointed(tmp_path, 1, 5, 17))
    parts = [part.batches() for part in WEIGHTED.parts(2)]
    with pytest.raises(SparkTorchError, match="KeyError while running: 'seen'"):
        run_on(parts, checkpointed(tmp_path, -1, 5, 0, restart=1))


def test_a_single_rank_has_a_process_group_and_a_part_of_a_tensor_comes_back_alone() -> None:
    (found,) = run_on([PLAIN.batches()], job(PLAIN, loops.reduced_by_hand))
    assert found["total"] == 1.0
    assert found["own"].untyped_storage().nbytes() == 4


def test_a_module_that_is_wrapped_later_has_the_parameters_of_rank_0() -> None:
    parts = [part.batches() for part in PLAIN.parts(2)]
    for found in run_on(parts, job(PLAIN, loops.two_modules, config={"strategy": "zero3"})):
        assert found["equal"]


def test_a_loop_without_a_loader_continues_the_generators_where_it_says(tmp_path: Path) -> None:
    parts = [part.batches() for part in PLAIN.parts(2)]
    expected = run_on(parts, job(PLAIN, loops.drawing, tmp_path / "calm"))
    checkpoint = CheckpointConfig(directory=str(tmp_path / "saved"), owner="me")
    killed = job(PLAIN, loops.drawing, tmp_path / "killed", checkpoint=checkpoint)
    with control_server() as server:
        assert run_ranks(server, parts, killed)[0].exitcode == -9
    assert run_on(parts, killed) == expected


@pytest.mark.filterwarnings("error")
def test_a_save_before_an_error_counts(tmp_path: Path) -> None:
    checkpoint = CheckpointConfig(directory=str(tmp_path), owner="me")
    parts = [part.batches() for part in PLAIN.parts(2)]
    with pytest.raises(SparkTorchError, match="after a save"):
        run_on(parts, job(PLAIN, loops.saving, checkpoint=checkpoint))
    assert run_on(parts, job(PLAIN, loops.saving, checkpoint=checkpoint)) == [1 << 20] * 2


def test_ranks_that_share_layers_draw_the_same_numbers_after_a_save_in_a_step_as_without_it(tmp_path: Path) -> None:
    parts = [part.batches() for part in PLAIN.parts(2)]
    config = {"strategy": "mesh", "strategy_params": {"tensor": 2}}
    checkpoint = CheckpointConfig(directory=str(tmp_path), owner="me")
    expected = run_on(parts, job(PLAIN, loops.drawing_together, False, config=config))
    with pytest.raises(SparkTorchError, match="after a save"):
        run_on(parts, job(PLAIN, loops.drawing_together, True, config=config, checkpoint=checkpoint))
    found = run_on(parts, job(PLAIN, loops.drawing_together, True, config=config, checkpoint=checkpoint))
    assert expected[0] == expected[1] == found[0] == found[1]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("sharded", "state holds a sharded tensor, which no single rank can save"),
        ("alone", "strategy 'localSGD' works in the optimizer's steps, and wrap got none"),
        ("exit", "the function raised SystemExit: 3"),
        ("module", "save takes a mapping, and state is a Linear"),
        ("early", "the ranks are not at the same point: return after 0 saves in rank 0; barrier in rank 1"),
        (
            "saves",
            "the ranks are not at the same point: loader after 1 saves in rank 0; loader after 0 saves in rank 1",
        ),
        ("result", "what the function returned, a lock, cannot be pickled"),
    ],
)
def test_what_a_function_cannot_do_is_refused_by_name(tmp_path: Path, what: str, says: str) -> None:
    config = {"strategy": {"sharded": "zero3", "alone": "localSGD"}.get(what, "ddp")}
    checkpoint = CheckpointConfig(directory=str(tmp_path), owner="me")
    parts = [part.batches() for part in WEIGHTED.parts(2)]
    with pytest.raises(SparkTorchError, match=says):
        run_on(parts, job(WEIGHTED, loops.sums, what, config=config, checkpoint=checkpoint))
