"""A training that was killed and goes on from its checkpoint ends as the one that was not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch import Callback
from sparktorch.base.config import StorageConfig
from sparktorch.data.columns import KEY
from sparktorch.errors import PersistenceError
from sparktorch.ml.fit.summary import ending
from sparktorch.train.callbacks import FitContext
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.worker import TrainJob
from tests.support.nets import Damped, Drifting, Lookup, Noisy, Spare, Tower
from tests.support.ranks import control_server, load_state, run_ranks, train_on
from tests.support.resume import (
    EPOCHS,
    STEPS,
    TABLE,
    Counts,
    OwnSteps,
    check_same_bits,
    job_for,
    killed,
    parts,
    timeless,
)
from tests.support.saving import saved_steps

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "strategy_params": {"bucket_cap_mb": 0.0002}},  # several buckets
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2", "strategy_params": {"min_parameters": 60}},
    "zero3": {"strategy": "zero3", "strategy_params": {"min_parameters": 60}},
    "mesh": {"strategy": "mesh", "strategy_params": {"min_parameters": 60, "shard": 2}},
    "from disk": {"strategy": "zero3", "shuffle_block": 4},
}


class Keeps(Callback):
    """Keeps an array."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {"sum": np.zeros(2)}}


class Wear(nn.Module):
    """Counts its passes in training, as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        return x

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.passes)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.passes = int(state)


class Worn(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.wear = Wear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.wear(x))


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("ddp", 3), ("zero1", 2), ("zero2", 3), ("zero3", 2), ("mesh", 4), ("from disk", 2)]
)
def test_the_weights_are_the_same_to_the_last_bit(strategy: str, ranks: int, tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    config = {"module": Worn, **STRATEGIES[strategy]}
    expected = train_on(parts(ranks), job_for(calm, Counts(calm), **config))
    assert expected[0]["wear._extra_state"] >= EPOCHS * STEPS
    step = STEPS + 3 + ranks  # somewhere in the second epoch
    kept = {"storage": StorageConfig(kind="disk", budget=1)} if strategy == "from disk" else {}
    killed(replace(job_for(rough, Counts(rough, rank=1, step=step), **config), **kept), ranks)
    left = saved_steps(CheckpointStore(str(rough / "checkpoints")))
    assert left
    assert step - 3 <= left[0] <= step
    check_same_bits(train_on(parts(ranks), replace(job_for(rough, Counts(rough), **config), **kept)), expected)
    for rank in range(ranks):
        assert (rough / f"steps-{rank}").read_text() == (calm / f"steps-{rank}").read_text() == str(EPOCHS * STEPS)


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_on(parts(1), job_for(tmp_path_factory.mktemp("calm"), module=Tower))


@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [("ddp", 2, 3), ("zero1", 4, 1), ("zero2", 3, 1), ("zero3", 2, 3), ("mesh", 4, 2)],
)
def test_another_number_of_ranks_goes_on_with_the_same_batches(
    strategy: str, before: int, after: int, on_one_rank: Any, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"module": Tower, **STRATEGIES[strategy]}
    expected, wanted = on_one_rank
    killed(job_for(tmp_path, Counts(tmp_path, rank=1, step=STEPS + 5), **config), before)
    found, metas = train_on(parts(after), job_for(tmp_path, **config))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for ours, theirs in zip(timeless(metas[0]["history"]), timeless(wanted[0]["history"]), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(("by_position", "before", "after"), [(True, 2, 1), (False, 1, 2)])
def test_rows_are_split_as_the_checkpoint_says_whatever_the_number_of_ranks(
    by_position: bool, before: int, after: int, tmp_path: Path
) -> None:
    crowded = TABLE.with_values(KEY, [5] * 250)  # equal rows: two ranks alone would split them by position
    rows = TABLE if by_position else crowded
    dies = Counts(tmp_path, rank=before - 1, step=STEPS + 5)
    first = replace(job_for(tmp_path, dies, module=Tower), by_position=by_position)
    with control_server() as server:
        run_ranks(server, [part.batches() for part in rows.parts(before)], first)
    expected, _ = train_on([rows.batches()], job_for(tmp_path / "calm", module=Tower))
    again = replace(job_for(tmp_path, module=Tower), max_imbalance=0.1)
    if by_position:
        with control_server() as server:
            (ended,) = run_ranks(server, [crowded.batches()], again)
        assert ended.result is not None
        assert ended.result.meta["imbalanced"]
        again = replace(again, by_position=True, max_imbalance=None)
    found, _ = train_on([part.batches() for part in rows.parts(after)], again)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_best_weights_of_before_the_kill_are_kept(tmp_path: Path) -> None:
    # At such a rate the loss soon jumps about: the best validation is an early one.
    config: dict[str, Any] = {"epochs": 40, "patience": 2, "schedule_interval": "epoch", "warmup_steps": 0}
    config["ema_decay"] = None

    def job(folder: Path, callback: Callback | None) -> TrainJob:
        made = job_for(folder, callback, module=Tower, **config)
        recipe = {"optimizer": "SGD", "optimizer_params": {"momentum": 0.9}, "learning_rate": 0.15}
        return replace(made, recipe=replace(made.recipe, scheduler=None, scheduler_params={}, **recipe))

    expected, wanted = train_on(parts(2), job(tmp_path / "calm", None))
    losses = [record["val_loss"] for record in wanted[0]["history"]]
    best = losses.index(min(losses))
    assert len(losses) < 40
    killed(job(tmp_path, Counts(tmp_path, rank=1, step=(best + 1) * STEPS + 9)), 2)
    check_same_bits(train_on(parts(2), job(tmp_path, None)), (expected, wanted))


@pytest.mark.parametrize("by_step", [False, True])
def test_another_fit_goes_on_with_a_training_whose_minutes_were_over(by_step: bool, tmp_path: Path) -> None:
    unit: dict[str, Any] = {"validation_unit": "step", "validation_interval": 3} if by_step else {}
    expected = train_on(parts(2), job_for(tmp_path / "calm", None, **unit))
    first = job_for(tmp_path, OwnSteps(tmp_path), owner="first", interval=100, max_minutes=1e-9, **unit)
    _, metas = train_on(parts(2), first)
    taken = 3 if by_step else STEPS
    assert metas[0]["out_of_time"]
    assert [record.get("steps", STEPS) for record in metas[0]["history"]] == [taken]
    second = job_for(tmp_path, OwnSteps(tmp_path), owner="second", interval=100, **unit)
    check_same_bits(train_on(parts(2), second), expected)
    assert (tmp_path / "steps-0").read_text() == str(EPOCHS * STEPS - taken)


def test_time_that_is_over_within_the_last_epoch_has_ended_the_training(tmp_path: Path) -> None:
    job = job_for(tmp_path, None, epochs=1, max_minutes=1e-9, validation_unit="step", validation_interval=3)
    _, metas = train_on(parts(1), job)
    assert metas[0]["out_of_time"]
    assert ending(metas[0]["history"], job.config, out_of_time=True).startswith("time:")


def test_the_checkpoint_of_the_best_validation_is_kept_over_a_restart(tmp_path: Path) -> None:
    job = job_for(tmp_path, Counts(tmp_path, rank=1, step=4 * STEPS + 3), module=Tower, epochs=5)
    recipe = replace(job.recipe, optimizer="SGD", optimizer_params={"momentum": 0.9}, learning_rate=0.15)
    assert job.checkpoint is not None
    by_epoch = replace(job.checkpoint, unit="epoch", keep=1)
    recipe = replace(recipe, scheduler=None, scheduler_params={})
    config = replace(job.config, schedule_interval="epoch", ema_decay=None)
    job = replace(job, recipe=recipe, config=config, checkpoint=by_epoch)
    killed(job, 2)
    _, metas = train_on(parts(2), job)
    losses = [record["val_loss"] for record in metas[0]["history"]]
    best = losses.index(min(losses)) + 1
    steps = saved_steps(CheckpointStore(by_epoch.directory))
    assert best == 4  # it was saved before the kill, and is not the last
    assert steps == [5 * STEPS, best * STEPS]


def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(PersistenceError, match="no checkpoint can hold callbacks") as caught:
        train_on(parts(1), job_for(tmp_path, Keeps()))
    assert "callbacks[0][1]['seen']['sum'], a numpy.ndarray" in caught.value.what
    assert "step" not in caught.value.where
    assert not saved_steps(CheckpointStore(str(tmp_path / "checkpoints")))


@pytest.mark.parametrize(
    ("module", "optimizer", "config"),
    [
        (Drifting, None, {"strategy_params": {"forward_sync_buffers": False}}),
        (Drifting, None, {"strategy": "zero2"}),
        (Tower, None, {"strategy_params": {"comm_hook": "powerSGD", "powersgd_start_step": 4}}),
        (Spare, None, {"unused_parameters": True}),  # a parameter without a state
        (Lookup, "SparseAdam", {}),
        (Tower, Damped, {"strategy": "zero1"}),
    ],
)
def test_what_each_rank_or_optimizer_has_for_itself_is_gone_on_with(
    module: type, optimizer: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    def job(folder: Path, callback: Callback | None = None) -> TrainJob:
        made = job_for(folder, callback, module=module, **config)
        own = {"optimizer": optimizer, "optimizer_params": {}} if optimizer else {}
        return replace(made, recipe=replace(made.recipe, **own))

    expected, _ = train_on(parts(2), job(tmp_path / "calm"))
    killed(job(tmp_path, Counts(tmp_path, rank=1, step=STEPS + 5)), 2)
    found, _ = train_on(parts(2), job(tmp_path))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_power_sgd_begins_at_the_same_step_with_and_without_checkpoints(tmp_path: Path) -> None:
    job = job_for(tmp_path, module=Tower, strategy_params={"comm_hook": "powerSGD", "powersgd_start_step": 4}, epochs=1)
    found, _ = train_on(parts(2), job)
    expected, _ = train_on(parts(2), replace(job, checkpoint=None))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_module_that_the_checkpoint_does_not_hold_is_refused(tmp_path: Path) -> None:
    killed(job_for(tmp_path, Counts(tmp_path, rank=1, step=STEPS + 3), module=Tower), 2)
    with pytest.raises(PersistenceError, match="the checkpoint lacks module"):
        train_on(parts(2), job_for(tmp_path, module=Noisy))


def test_a_training_that_has_ended_is_returned_again_without_a_step_and_another_fit_begins_anew(tmp_path: Path) -> None:
    first, wanted = train_on(parts(2), job_for(tmp_path, epochs=1))
    lost, metas = train_on(parts(2), job_for(tmp_path, OwnSteps(tmp_path), epochs=1))  # as after a worker's loss
    assert all(torch.equal(first[name], lost[name]) for name in first)
    assert timeless(metas[0]["history"]) == timeless(wanted[0]["history"])
    assert (tmp_path / "steps-0").read_text() == "0"
    again, metas = train_on(parts(2), job_for(tmp_path, owner="another fit", epochs=1))
    assert len(metas[0]["history"]) == 1
    assert all(torch.equal(first[name], again[name]) for name in first)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert [name[:14] for name in names] == ["finished.json", f"step-{STEPS - 1:09d}", f"step-{STEPS:09d}"]


def lasting(epochs: int, folder: Path, callback: Callback | None = None, **recipe: Any) -> TrainJob:
    made = job_for(folder, callback, epochs=epochs)
    assert made.checkpoint is not None
    constant: dict[str, Any] = {"scheduler": None, "scheduler_params": {}, **recipe}
    checkpoint = replace(made.checkpoint, job={"epochs": repr(epochs)})
    return replace(made, recipe=replace(made.recipe, **constant), checkpoint=checkpoint)


def of_another_fit(job: TrainJob) -> TrainJob:
    assert job.checkpoint is not None
    return replace(job, checkpoint=replace(job.checkpoint, owner="another fit"))


def test_more_epochs_go_on_with_a_training_finished_or_not_and_end_as_all_of_them_at_once(tmp_path: Path) -> None:
    expected = train_on(parts(2), lasting(4, tmp_path / "calm"))
    killed(lasting(2, tmp_path / "cut", Counts(tmp_path, rank=1, step=STEPS + 3)), 2)
    train_on(parts(2), lasting(2, tmp_path / "ended"))
    steps = OwnSteps(tmp_path / "ended")
    for job in (lasting(4, tmp_path / "cut"), of_another_fit(lasting(4, tmp_path / "ended", steps))):
        check_same_bits(train_on(parts(2), job), expected)
    assert (tmp_path / "ended" / "steps-0").read_text() == str(2 * STEPS)


def test_epochs_that_a_training_cannot_go_on_to_are_refused_and_leave_it_as_it_is(tmp_path: Path) -> None:
    for name, recipe in (("constant", {}), ("by_epochs", {"scheduler": "CosineAnnealingLR"})):
        train_on(parts(2), lasting(2, tmp_path / name, **recipe))
    with pytest.raises(PersistenceError, match="holds a training that has done 2 epochs"):
        train_on(parts(2), of_another_fit(lasting(1, tmp_path / "constant")))
    longer = of_another_fit(lasting(3, tmp_path / "by_epochs", scheduler="CosineAnnealingLR"))
    with pytest.raises(
        PersistenceError, match=r"of 2 epochs that cannot go on to 3.* CosineAnnealingLR gets T_max from epochs"
    ):
        train_on(parts(2), longer)
    for name in ("constant", "by_epochs"):
        store = CheckpointStore(str(tmp_path / name / "checkpoints"))
        assert (store.finished, saved_steps(store)[0]) == (True, 2 * STEPS)


def test_rows_or_settings_of_another_training_are_refused(tmp_path: Path) -> None:
    job = job_for(tmp_path, Counts(tmp_path, rank=0, step=6))
    assert job.checkpoint is not None
    killed(job, 2)
    other = replace(job, checkpoint=replace(job.checkpoint, job={"learningRate": "0.5"}))
    with pytest.raises(PersistenceError, match=r"another configuration \(learningRate: None there, '0\.5' here\)"):
        train_on(parts(2), other)
    with pytest.raises(PersistenceError, match=r"another configuration \(data: "):
        train_on([TABLE.take(slice(0, 200)).batches(), []], job)  # type: ignore[arg-type]


def test_a_training_goes_on_from_before_contents_were_told_and_says_that_initial_weights_differ(tmp_path: Path) -> None:
    def job(loss: str, weights: str, callback: Callback | None = None) -> TrainJob:
        made = job_for(tmp_path, callback)
        assert made.checkpoint is not None
        return replace(made, checkpoint=replace(made.checkpoint, job={"loss": loss, "initialWeights": weights}))

    killed(job("[<lambda>]", "those", Counts(tmp_path, rank=0, step=6)), 2)
    with control_server() as server:
        ended = run_ranks(server, parts(2), job("[<lambda> (sha256 0123456789abcdef)]", "these"))
        warnings = [warning["text"] for warning in server.new_warnings(server.beats(2))]
    assert all(rank.result is not None for rank in ended)
    assert [text for text in warnings if "other initial weights" in text]


def test_a_damaged_checkpoint_is_left_out_with_a_warning(tmp_path: Path) -> None:
    expected, _ = train_on(parts(2), job_for(tmp_path / "calm"))
    killed(job_for(tmp_path, Counts(tmp_path, rank=1, step=STEPS + 5)), 2)
    folder = tmp_path / "checkpoints"
    latest = CheckpointStore(str(folder)).usable()[0]
    assert latest is not None
    path = folder / f"step-{latest.step:09d}-{latest.attempt}" / "rank-00001.pt"
    path.write_bytes(path.read_bytes()[:-1])
    with control_server() as server:
        ended = run_ranks(server, parts(2), job_for(tmp_path))
        (warning,) = [w for w in server.new_warnings(server.beats(2)) if f"step {latest.step} is damaged" in w["text"]]
    assert "rank-00001.pt" in warning["text"]
    assert ended[0].result is not None
    assert all(torch.equal(load_state(ended[0].result)[name], value) for name, value in expected.items())


class StopsAndDies(Counts):
    """Asks to stop within the first epoch, in its last rank, and is killed two steps later."""

    def on_step_end(self, context: FitContext) -> None:
        if context.step == 3 and context.world.rank == context.world.world_size - 1:
            context.stop()
        super().on_step_end(context)


@pytest.mark.parametrize("after", [2, 1])
def test_a_stop_that_was_asked_for_before_a_kill_ends_the_training_with_the_epoch(after: int, tmp_path: Path) -> None:
    killed(job_for(tmp_path, StopsAndDies(tmp_path, rank=1, step=5)), 2)
    _, metas = train_on(parts(after), job_for(tmp_path, StopsAndDies(tmp_path)))
    assert [record["epoch"] for record in metas[0]["history"]] == [1]
