"""What ranks have counted is neither lost nor counted twice when another number of them goes on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.summary import best_validation
from sparktorch.ml.tuning.search import value_of
from sparktorch.train.loop.progress import Progress
from sparktorch.train.loop.validation import Best, improvements

STEPS = 6
WEIGHTS = torch.tensor([4.0, 4.0, 4.0, 4.0, 4.0, 2.0], dtype=torch.float64)
CPU = torch.device("cpu")
PATIENT = TrainConfig(patience=3)


def in_epoch(ranks: int, taken: int) -> list[Progress]:
    found = []
    for rank in range(ranks):
        progress = Progress(STEPS, PATIENT, CPU)
        progress.end_epoch({"epoch": 1, "loss": 0.5, "val_loss": 0.25})
        progress.best.offer({"val_loss": 0.25}, lambda: {"x": torch.ones(2)})
        progress.best.offer({"val_loss": 0.75}, dict)
        progress.confusion, progress.validated_step = torch.eye(2), STEPS
        counters = progress.counters
        counters.untrained = {"val_loss": 0.5}
        counters.losses[:taken] = torch.arange(taken) + 10.0 * rank
        counters.taken, counters.rows, counters.waited = taken, 3 * taken + rank, 0.5 + rank
        counters.positions, counters.elements, counters.skipped, counters.seconds = 100, 60 + rank, [1], 2.0
        found.append(progress)
    return found


def resumed(before: list[Progress], ranks: int) -> list[Progress]:
    states = [progress.state() for progress in before]
    found = [Progress(STEPS, PATIENT, CPU) for _ in range(ranks)]
    for rank, progress in enumerate(found):
        progress.merge(states[0], states[rank::ranks], {"x": torch.ones(2)} if rank == 0 else {})
    return found


def record(ranks: list[Progress]) -> dict[str, Any]:
    sums = sum((progress.counters.sums() for progress in ranks), torch.zeros(7, dtype=torch.float64))
    return ranks[-1].record(sums, WEIGHTS, 4.0, len(ranks), number=2, learning_rate=0.1)


@pytest.mark.parametrize("taken", [2, STEPS])
@pytest.mark.parametrize("after", [1, 3, 7])
@pytest.mark.parametrize("before", [1, 3, 7])
def test_the_record_of_the_epoch_is_that_of_the_ranks_that_began_it(before: int, after: int, taken: int) -> None:
    began = in_epoch(before, taken)
    goes_on = resumed(began, after)
    wanted, found = record(began), record(goes_on)
    shares = wanted.pop("data_wait_share") * before, found.pop("data_wait_share") * after
    assert shares[1] == pytest.approx(shares[0])
    assert found.pop("untrained") == wanted.pop("untrained") == {"val_loss": 0.5}
    assert found == pytest.approx(wanted)
    losses = sum((progress.counters.losses for progress in goes_on), torch.zeros(STEPS, dtype=torch.float64))
    assert torch.equal(losses, sum(progress.counters.losses for progress in began))


@pytest.mark.parametrize("after", [1, 2, 5])
def test_every_rank_knows_what_all_knew(after: int) -> None:
    for progress in resumed(in_epoch(2, 4), after):
        assert progress.history == [{"epoch": 1, "loss": 0.5, "val_loss": 0.25}]
        assert (progress.validated_step, progress.ended) == (STEPS, False)
        assert (progress.counters.taken, progress.counters.skipped, progress.counters.seconds) == (4, [1], 2.0)
        assert progress.confusion is not None
        assert progress.last_validation()["val_loss"] == 0.25
        assert progress.best.state is not None, "although only rank 0 holds the weights"
        assert not progress.best.out_of_patience
        progress.best.offer({"val_loss": 0.5}, dict)
        progress.best.offer({"val_loss": math.nan}, dict)
        assert progress.best.out_of_patience


def test_a_record_leaves_out_skipped_steps_and_those_that_were_not_taken() -> None:
    progress = in_epoch(1, 4)[0]
    assert record([progress])["loss"] == pytest.approx(float(progress.counters.losses.sum()) / 12)
    assert record([progress])["padding_share"] == pytest.approx(0.4)
    assert torch.equal(WEIGHTS[:2], torch.tensor([4.0, 4.0], dtype=torch.float64)), "and weights are what they were"


def test_the_last_validation_is_that_of_this_epoch_where_there_is_one() -> None:
    progress = in_epoch(1, 4)[0]
    progress.counters.validations.append({"step": 8, "val_loss": 0.125})
    assert progress.last_validation()["val_loss"] == 0.125
    progress.end_epoch({"epoch": 2, "loss": 0.25})
    assert "val_loss" not in progress.last_validation()
    assert Progress(STEPS, TrainConfig(), CPU).last_validation() == {}


@pytest.mark.parametrize(
    ("rule", "values", "bests"),
    [
        ({}, [2.0, 3.0, math.nan, 1.0], [0, 3]),
        ({"best_metric": "val_accuracy"}, [math.nan, 0.5, 0.25, math.nan, 0.75], [1, 4]),
        ({"best_metric": "val_MAE", "best_mode": "max"}, [0.5, 0.75, 0.25], [0, 1]),
        ({"best_delta": 0.25}, [2.0, 1.875, 1.75, 1.625], [0, 3]),
        ({"best_metric": "val_f1", "best_delta": 0.25}, [-1.0, -0.875, -0.75, 0.0], [0, 3]),
    ],
)
def test_the_best_validation_goes_by_metric_mode_and_delta_also_over_restarts(
    rule: dict[str, Any], values: list[float], bests: list[int]
) -> None:
    config = TrainConfig(patience=9, **rule)
    records = [{config.best_metric: value, "place": place} for place, value in enumerate(values)]
    assert [found["place"] for found, _ in improvements(records, config)] == bests
    best, offered = Best(config), []
    for record in records:
        offered.append(best.offer(record, lambda: {"x": torch.ones(2)}))
        before, best = best, Best(config)
        best.load_state_dict(before.state_dict(), before.state or {})
    assert [place for place, was in enumerate(offered) if was] == bests


def test_the_validation_before_the_first_step_may_be_the_best() -> None:
    first = {"epoch": 1, "loss": 1.0, "untrained": {"val_loss": 1.0}}
    later = [{"epoch": 2, "loss": 1.0, "val_loss": 3.0}, {"epoch": 3, "loss": 1.0, "val_loss": 0.5}]
    for history, best in (([first], 1.0), ([first, later[0]], 1.0), ([first, *later], 0.5)):
        assert [found["val_loss"] for found, _ in improvements(history, PATIENT)][-1] == best
        assert value_of(history, "val_loss", PATIENT) == best
    assert best_validation([first, later[0]], PATIENT) == {"epoch": 0, "val_loss": 1.0}
    assert best_validation([first, *later], PATIENT) == {"epoch": 3, "val_loss": 0.5}


def test_a_validation_without_the_metric_is_an_error_that_names_what_it_has() -> None:
    metrics = {"val_loss": 1.0, "val_error": 2.0}
    for config in (TrainConfig(best_metric="val_eror"), TrainConfig(patience=1, best_metric="val_eror")):
        with pytest.raises(ConfigError, match=r"(?s)earlyStoppingMetric is 'val_eror'.*val_error, val_loss"):
            Best(config).offer(metrics, dict)
    assert Best(TrainConfig()).offer({}, dict), "which nothing looks at"
