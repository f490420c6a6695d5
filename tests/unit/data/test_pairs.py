"""What pairs of users and items become: indices, drawn items, features, scores and losses."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparktorch.base.batch import Batch
from sparktorch.data.columns import TensorSpec
from sparktorch.model.trained_module import TrainedModule
from sparktorch.tasks.recommender.network import IdIndex, PairLoss, Pairs, Towers
from sparktorch.train.recipe.dry_run import ArgumentSpec
from tests.support.models import trained_module


def structs(**columns: Any) -> pa.StructArray:
    return pa.StructArray.from_arrays([pa.array(values) for values in columns.values()], names=list(columns))


NO_FEATURES = np.zeros((50, 0), np.float32)
PAIRS = Pairs("who", "what", structs(who=["ann", "bob", "Ünal"]), structs(what=[3, 7, 1 << 40, -2, 9]))


@pytest.mark.parametrize(
    ("known", "asked", "expected"),
    [
        (["b", "a", ""], pa.array(["a", None, "", "c", "b"]), [1, -1, 2, -1, 0]),
        ([5, -(1 << 62), 0], pa.array([0, None, 5, 4, -(1 << 62)]), [2, -1, 0, -1, 1]),
        (pa.array([5, 0], pa.int8()), pa.array([0, 300, 5], pa.int64()), [1, -1, 0]),
        (["a"], pa.array(["a", "b"], pa.large_string()), [0, -1]),
    ],
)
def test_an_id_is_known_by_its_place_and_null_is_unknown(known: Any, asked: pa.Array, expected: list[int]) -> None:
    assert IdIndex(structs(id=known)).indices(asked).tolist() == expected


def test_other_items_are_drawn_evenly_and_anew_in_each_epoch_for_a_row_wherever_it_is() -> None:
    rows = {"who": pa.array(["ann", "bob", "Ünal"] * 400), "what": np.array([3, 7, 1 << 40, -2, 9, 3] * 200)}
    drawing = replace(PAIRS, negatives=3, seed=4)
    items = drawing(rows, epoch=0, generator=None)["item"]
    assert items.shape == (1200, 4)
    assert items[:6, 0].tolist() == [0, 1, 2, 3, 4, 0]
    assert not (items[:, 1:] == items[:, :1]).any()
    part = drawing({name: column[7:9] for name, column in rows.items()}, epoch=0, generator=None)["item"]
    assert torch.equal(part, items[7:9])
    other = drawing(rows, epoch=1, generator=None)["item"]
    assert (other != items)[:, 1:].any()
    epochs = [drawing(rows, epoch=epoch, generator=None)["item"][:6, 1:] for epoch in range(200)]
    counts = Counter((torch.stack(epochs) - items[:6, :1]).remainder(5).flatten().tolist())
    assert set(counts) == {1, 2, 3, 4}
    assert max(counts.values()) < 1.15 * min(counts.values())


def test_features_are_those_of_the_known_id_or_of_the_row_in_units_of_the_known_ones() -> None:
    users = structs(who=["a", "b"], age=[10.0, 30.0], same=[5.0, 5.0])
    pairs = Pairs("who", "what", users, PAIRS.items)
    columns = {"who": pa.array(["b", "new"]), "what": pa.array([3, 3])}
    found = pairs({**columns, "age": np.array([99.0, 40.0]), "same": pa.array([5, 6])}, epoch=None, generator=None)
    assert list(found) == ["user", "item", "user_features", "item_features"]
    assert found["user_features"].tolist() == [[1.0, 0.0], [2.0, 1.0]]
    assert found["item_features"].shape == (2, 0)


def test_what_is_looked_up_is_pickled_without_what_look_ups_need() -> None:
    before = len(pickle.dumps(PAIRS))
    assert PAIRS.user_index.indices(pa.array(["bob"])).tolist() == [1]
    copy = pickle.loads(pickle.dumps(PAIRS))
    assert len(pickle.dumps(PAIRS)) == before
    assert copy == PAIRS


def test_a_score_is_a_product_with_biases_and_an_unknown_id_has_none_without_features() -> None:
    torch.manual_seed(0)
    towers = Towers(3, 5, 2, mean=0.5, item_features=1, hidden=(4,))
    user, item = torch.tensor([0, 2, -1, 1]), torch.tensor([4, 0, 1, -1])
    features = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    found = towers(user, item, None, features)
    own = torch.cat([towers.users.weight[[0, 2]], towers.users.weight[[1]]])
    theirs = towers.items.weight[[4, 0, 0]] * torch.tensor([[1.0], [1.0], [0.0]]) + towers.item_layers(
        features[[0, 1, 3]]
    )
    expected = (own[:, :2] * theirs[:, :2]).sum(1) + own[:, 2] + theirs[:, 2] + 0.5
    torch.testing.assert_close(found[[0, 1, 3]], expected)
    assert found[2].isnan()
    scores, squares = towers(user, item, None, features, penalised=True)
    torch.testing.assert_close(scores[[0, 1, 3]], expected)
    torch.testing.assert_close(squares[:2], own[:2].square().sum(1) + theirs[:2].square().sum(1))


def test_against_all_other_items_the_loss_is_the_cross_entropy_and_drawn_ones_estimate_it() -> None:
    torch.manual_seed(0)
    towers = Towers(3, 50, 4).eval()
    torch.nn.init.normal_(towers.items.weight)
    user, item = torch.arange(3), torch.tensor([7, 0, 49])
    every = torch.arange(50).expand(3, -1)
    expected = torch.nn.functional.cross_entropy(towers(user, every), item, reduction="none")
    others = torch.stack([torch.cat([item[row : row + 1], every[row][every[row] != item[row]]]) for row in range(3)])
    step = PairLoss(50, 0.3)
    torch.testing.assert_close(step(towers, Batch((user, others), None, None, 3)), expected)
    pairs = Pairs("u", "i", structs(u=[0, 1, 2]), structs(i=list(range(50))), negatives=20_000)
    drawn = pairs({"u": user.numpy(), "i": item.numpy()}, epoch=0, generator=None)
    torch.testing.assert_close(step(towers, Batch(tuple(drawn.values()), None, None, 3)), expected, atol=0.05, rtol=0)
    penalised = step(towers.train(), Batch((user, others), None, None, 3)) - expected
    squares = towers.users.weight.square().sum(1) + towers.items.weight[item].square().sum(1)
    torch.testing.assert_close(penalised, 0.3 * squares)


def test_a_user_has_the_weighted_mean_cross_entropy_of_its_items_among_all() -> None:
    torch.manual_seed(0)
    towers = Towers(3, 50, 4, user_bias=False, ranks_all=True).eval()
    torch.nn.init.normal_(towers.items.weight)
    user, item = torch.tensor([2, 2, 2, 0, 0]), torch.tensor([7, 0, 49, 7, 3])
    ratings, sizes = torch.tensor([math.e - 1, math.e**3 - 1, 0.0, 0.0, 2.0]), torch.tensor([3, 2])
    scores = towers(user, torch.arange(50).expand(5, -1))
    losses = torch.nn.functional.cross_entropy(scores, item, reduction="none")
    step = PairLoss(50, 0.3, alpha=2.0, catalogue=NO_FEATURES)
    found = step(towers, Batch((user, item), ratings, None, 2, sizes=sizes))
    torch.testing.assert_close(found, torch.stack([(3 * losses[0] + 7 * losses[1]) / 10, losses[4]]))
    alike = step(towers, Batch((user, item), None, None, 2, sizes=sizes))
    torch.testing.assert_close(alike, torch.stack([losses[:3].mean(), losses[3:].mean()]))


def test_the_squares_of_a_user_count_as_the_square_root_of_the_number_of_its_items() -> None:
    torch.manual_seed(0)
    towers, step = Towers(2, 50, 4, user_bias=False, ranks_all=True), PairLoss(50, 0.3, catalogue=NO_FEATURES)
    torch.nn.init.zeros_(towers.items.weight)
    user, sizes = torch.tensor([0] * 20 + [1] * 5), torch.tensor([20, 5])
    losses = step(towers, Batch((user, torch.arange(25)), None, None, 2, sizes=sizes)) - math.log(50)
    squares = towers.users.weight[:, :-1].square().sum(1)
    torch.testing.assert_close(losses, 0.3 * squares * torch.tensor([1.0, 2.0]))


def test_scores_and_penalty_are_in_the_unit_of_the_ratings() -> None:
    torch.manual_seed(0)
    towers, user, item = Towers(3, 5, 2), torch.tensor([0, 2]), torch.tensor([4, 1])
    label = torch.tensor([1.0, -2.0])
    scaled = Towers(3, 5, 2, mean=50.0, scale=20.0)
    scaled.load_state_dict(towers.state_dict())
    torch.testing.assert_close(scaled(user, item), 50 + 20 * towers(user, item))
    losses = PairLoss(None, 0.3)(towers, Batch((user, item), label, None, 2))
    larger = PairLoss(None, 0.3, scale=20.0)(scaled, Batch((user, item), 50 + 20 * label, None, 2))
    torch.testing.assert_close(larger, 400 * losses)


def test_ids_are_saved_as_arrow_arrays_without_pickle(tmp_path: Path) -> None:
    pairs = replace(PAIRS, users=structs(who=["ann", "Ünal"], age=[1.5, -0.1]))
    whole = torch.zeros(2, dtype=torch.int64)
    trained = trained_module(
        "sparktorch.tasks.recommender.network:Towers",
        *(whole, whole),
        params={"users": 2, "items": 5, "rank": 2},
        inputs=[TensorSpec(name=n, column=n, dtype="float32", kind="any", sql="string") for n in ("who", "what")],
        preprocess=pairs,
        arguments=tuple(ArgumentSpec(name, "int64", ()) for name in ("user", "item")),
        returned=("user", "item"),
    )
    trained.save(tmp_path)
    assert not list(tmp_path.glob("*.pkl"))
    assert TrainedModule.load(tmp_path).preprocess == pairs
