"""What a recommender asks of its network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparktorch.data.pairs import PairLoss
from sparktorch.ml.tasks.recommender import Recommender, _Seen
from sparktorch.spark.recommend import Vectors


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
        ({"batchSize": 600}, False),
        ({"implicitPrefs": True}, True),
        ({"implicitPrefs": True, "numNegatives": 64}, False),
        ({"implicitPrefs": True, "numNegatives": 2}, True),
        ({"moduleParams": {"sparse": False}}, False),
    ],
)
def test_gradients_of_tables_are_sparse_where_that_is_faster_and_possible(params: dict[str, Any], sparse: bool) -> None:
    estimator = Recommender(**{"batchSize": 100, **params})
    estimator._seen = _Seen(known(3_000), known(1_000), 3.5)
    assert estimator.completed().getModuleParams()["sparse"] is sparse


def test_the_loss_estimates_a_choice_among_all_items_or_squares_the_error() -> None:
    estimator = Recommender(implicitPrefs=True, ratingCol="", regParam=0.2, numNegatives=5)
    estimator._seen = _Seen(known(3), known(7), 0.0)
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
        ({"implicitPrefs": False, "ratingCol": "stars"}, 7, 0),
    ],
)
def test_all_items_are_ranked_where_users_can_stay_whole_and_items_are_not_too_many(
    params: dict[str, Any], items: int, drawn: int
) -> None:
    estimator = Recommender(**{"implicitPrefs": True, "ratingCol": "", **params})
    estimator._seen = _Seen(known(3), known(items), 0.0, group="chosen_by")
    completed = estimator.completed()
    implicit = estimator.getImplicitPrefs()
    assert completed.getPreprocess().negatives == drawn
    assert (completed.getTrainingStep().catalogue is not None) == (implicit and not drawn)
    assert estimator._group() == ("chosen_by" if implicit and not drawn else None)


def test_choices_hold_out_nothing_unless_a_share_is_set() -> None:
    assert Recommender()._holds_out
    assert not Recommender(implicitPrefs=True)._holds_out
    assert Recommender(implicitPrefs=True, validationFraction=0.2)._holds_out


@pytest.mark.parametrize("most", [2, 4, 1000])
def test_vectors_beyond_the_elements_of_an_array_are_in_several_chunks(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparktorch.spark.recommend._MOST_ELEMENTS", most)
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    table = Vectors(known(5), values).table()
    assert table["features"].to_pylist() == values.tolist()
    assert table["features"].num_chunks == max(1, -(-5 // (most // 2)))
