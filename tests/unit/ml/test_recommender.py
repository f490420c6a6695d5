"""What a recommender asks of its network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparktorch.errors import ConfigError
from sparktorch.tasks.recommender.estimator import USER_SAMPLES, Recommender
from sparktorch.tasks.recommender.learned import LearnedPairs, _moments
from sparktorch.tasks.recommender.lists import Vectors
from sparktorch.tasks.recommender.network import PairLoss
from sparktorch.tasks.shared.held_out import MOST_HELD_OUT, Sample
from sparktorch.tasks.shared.settings import automatic_settings


def known(count: int) -> pa.StructArray:
    return pa.StructArray.from_arrays([pa.array(range(count))], names=["id"])


@pytest.mark.parametrize(
    ("params", "sparse"),
    [
        ({}, True),
        ({"optimizer": "SGD"}, True),
        ({"optimizer": "AdamW"}, False),
        ({"optimizerParams": {"weight_decay": 0.1}}, False),
        ({"gradientClipNorm": 1.0}, False),
        ({"strategy": "zero3"}, False),
        ({"batchSize": 1200}, False),
        ({"implicitPrefs": True}, True),
        ({"implicitPrefs": True, "numNegatives": 64}, False),
        ({"implicitPrefs": True, "numNegatives": 2}, True),
        ({"moduleParams": {"sparse": False}}, False),
    ],
)
def test_gradients_of_tables_are_sparse_where_that_is_faster_and_possible(params: dict[str, Any], sparse: bool) -> None:
    estimator = Recommender(**{"batchSize": 100, **params})
    estimator._learned = LearnedPairs(known(6_000), known(2_000), 3.5)
    assert estimator.completed().getModuleParams()["sparse"] is sparse


def test_gradients_of_small_tables_are_dense() -> None:
    estimator = Recommender(batchSize=100)
    estimator._learned = LearnedPairs(known(4_000), known(1_000), 3.5)
    assert estimator.completed().getModuleParams()["sparse"] is False


def test_the_loss_estimates_a_choice_among_all_items_or_squares_the_error() -> None:
    estimator = Recommender(implicitPrefs=True, ratingCol="", regParam=0.2, numNegatives=5)
    estimator._learned = LearnedPairs(known(3), known(7), 0.0)
    found = estimator.completed()
    assert found.getTrainingStep() == PairLoss(7, 0.2)
    assert found.getPreprocess().negatives == 5
    assert not found.getModuleParams()["user_bias"]
    estimator.setImplicitPrefs(False).setRatingCol("stars")
    found = estimator.completed()
    assert found.getTrainingStep() == PairLoss(None, 0.2)
    assert found.getPreprocess().negatives == 0
    assert found.getLabelCol() == "stars"


@pytest.mark.parametrize(
    ("params", "items", "drawn"),
    [
        ({}, 7, 0),
        ({"numNegatives": 5}, 7, 5),
        ({}, 20_001, 64),
        ({"strategy": "mesh", "strategyParams": {"shard": 1}}, 7, 64),
        ({"split": "keep"}, 7, 64),
        ({"strategy": "independent"}, 7, 64),
        ({"implicitPrefs": False, "ratingCol": "stars"}, 7, 0),
    ],
)
def test_all_items_are_ranked_where_users_can_stay_whole_and_items_are_not_too_many(
    params: dict[str, Any], items: int, drawn: int
) -> None:
    estimator = Recommender(**{"implicitPrefs": True, "ratingCol": "", **params})
    estimator._learned = LearnedPairs(known(3), known(items), 0.0, group="chosen_by")
    completed = estimator.completed()
    implicit = estimator.getImplicitPrefs()
    assert completed.getPreprocess().negatives == drawn
    assert (completed.getTrainingStep().catalogue is not None) == (implicit and not drawn)
    assert estimator._task_training().group == ("chosen_by" if implicit and not drawn else None)


def test_choices_hold_out_nothing_unless_a_share_is_set() -> None:
    assert Recommender()._holds_out
    assert not Recommender(implicitPrefs=True)._holds_out
    assert Recommender(implicitPrefs=True, validationFraction=0.2)._holds_out


@pytest.mark.parametrize(
    "params",
    [
        {"earlyStoppingPatience": 3},
        {"earlyStoppingMetric": "val_loss"},
        {"metrics": {"auroc": "AUROC"}},
        {"scheduler": "ReduceLROnPlateau"},
    ],
)
def test_choices_hold_out_the_usual_share_where_a_param_needs_validation_rows(params: dict[str, Any]) -> None:
    assert Recommender(implicitPrefs=True, **params)._holds_out
    assert not Recommender(implicitPrefs=True, validationFraction=0.0, **params)._holds_out


def test_a_search_holds_out_choices_as_it_does_ratings() -> None:
    for implicit in (True, False):
        searched = Recommender(implicitPrefs=implicit)._holding_out()
        assert searched._holds_out
        assert searched.setEpochs(3)._holds_out
        assert not Recommender(implicitPrefs=implicit, epochs=3)._holding_out()._holds_out


def test_choices_whose_epochs_are_set_have_the_batch_and_schedule_of_those_whose_are_not() -> None:
    estimator = Recommender(implicitPrefs=True, ratingCol="", epochs=5)
    estimator._learned = LearnedPairs(known(1_000), known(7), 0.0, group="chosen_by")
    estimator._sample = Sample(trained=1_000)
    expected = automatic_settings(1_000, USER_SAMPLES, validates=False).params
    found = estimator.completed()
    names = ("batchSize", "learningRate", "scheduler", "earlyStoppingPatience")
    assert {name: found.getOrDefault(name) for name in names} == {name: expected[name] for name in names}
    assert (found.getEpochs(), found.getBatchSize(), found.getSchedulerInterval()) == (5, 32, "step")
    marked = estimator.setValidationIndicatorCol("held_out").completed()
    assert marked.getOrDefault("earlyStoppingPatience") is None
    assert marked.getValidationInterval() == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "differing"),
    [
        ({"alpha": 2.0}, {}, ["alpha"]),
        ({"alpha": 2.0}, {"implicitPrefs": False}, ["implicitPrefs", "alpha"]),
        ({"numNegatives": 4}, {"numNegatives": 8}, []),
        ({"numNegatives": 4}, {}, ["numNegatives"]),
        ({"strategy": "mesh"}, {}, ["strategy"]),
        ({"strategy": "zero1"}, {}, []),
        ({"implicitPrefs": False, "alpha": 2.0, "strategy": "mesh"}, {"implicitPrefs": False}, []),
    ],
)
def test_rows_are_prepared_for_the_weights_of_choices_and_for_users_that_stay_whole(
    ours: dict[str, Any], theirs: dict[str, Any], differing: list[str]
) -> None:
    other = Recommender(**{"implicitPrefs": True, **theirs})
    other._learned = LearnedPairs(known(3), known(7), 0.0)
    estimator = Recommender(**{"implicitPrefs": True, **ours})
    assert estimator._differing(other) == differing
    if differing:
        with pytest.raises(ConfigError, match=f"differs in {differing[0]}"):
            estimator._knowing(other)
    else:
        assert estimator._knowing(other)._learned is other._learned


def test_the_deviation_of_ratings_does_not_cancel_out_and_no_order_changes_it() -> None:
    draw = np.random.default_rng(0)
    groups = [1e8 + draw.normal(size=count) for count in (1, 7, 500, 20)]
    figures = np.array([[len(one), one.mean(), one.var()] for one in groups])
    mean, deviation = _moments(*figures.T)
    assert (mean, deviation) == _moments(*figures[::-1].T)
    assert deviation == pytest.approx(np.concatenate(groups).std(), rel=1e-5)


def test_users_hold_out_no_more_pairs_than_samples_may_be_and_all_of_them_train() -> None:
    estimator = Recommender(implicitPrefs=True, ratingCol="", validationFraction=0.1)
    estimator._marks, estimator._learned = "held_out", LearnedPairs(known(60_000), known(7), 0.0, rows=2_000_000)
    trained, held_out = estimator._count(None)  # type: ignore[arg-type]  # the rows were counted
    assert (trained, held_out) == (60_000, 60_000)
    assert estimator._capped(trained, held_out) == (MOST_HELD_OUT / 200_000, 60_000)


@pytest.mark.parametrize("most", [2, 4, 1000])
def test_vectors_beyond_the_elements_of_an_array_are_in_several_chunks(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparktorch.tasks.recommender.lists._MOST_ELEMENTS", most)
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    table = Vectors(known(5), values).table()
    assert table["features"].to_pylist() == values.tolist()
    assert table["features"].num_chunks == max(1, -(-5 // (most // 2)))
