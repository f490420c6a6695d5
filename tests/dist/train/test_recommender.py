"""N ranks learn the vectors that one plain loop learns, with the same drawn items, or with all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import GROUP, LABEL, VALIDATION, WEIGHT, Groups, TensorSpec, input_name
from sparktorch.data.preprocess import Preprocess
from sparktorch.data.sampling.plan import SamplingPlan, mix_words
from sparktorch.tasks.recommender.network import IdIndex, PairLoss, Pairs, Towers
from sparktorch.train.recipe.recipe import Recipe
from tests.support.frames import Table
from tests.support.groups import parts
from tests.support.ranks import train_job, train_on

ROWS, USERS, ITEMS, BATCH, EPOCHS, SEED, PENALTY = 301, 20, 13, 32, 3, 11, 0.05
NAMES = ("user", "item", "age", "price")
PARAMS: dict[str, Any] = {"users": USERS, "items": ITEMS, "rank": 4, "mean": 2.5}


def structs(**columns: Any) -> pa.StructArray:
    return pa.StructArray.from_arrays([pa.array(values) for values in columns.values()], names=list(columns))


def ratings(*, implicit: bool, features: bool) -> Table:
    """Ratings by three quarters of the users, and rows for validation by all of them."""
    draw = np.random.default_rng(3)
    table = Table.random(ROWS, weighted=implicit, validated=True)
    held_out = table.arrays[VALIDATION]
    user = np.where(held_out, draw.integers(0, USERS + 5, ROWS), draw.integers(0, USERS, ROWS))
    item = draw.integers(0, ITEMS, ROWS)
    ages, prices = draw.normal(size=USERS + 5), draw.normal(size=ITEMS)
    columns = [user, item, *([ages[user], prices[item]] if features else [])]
    pairs = Pairs(
        "user",
        "item",
        structs(user=np.arange(USERS), **({"age": ages[:USERS]} if features else {})),
        structs(item=np.arange(ITEMS), **({"price": prices} if features else {})),
        negatives=6 if implicit else 0,
        seed=SEED,
    )
    specs = tuple(
        TensorSpec(name=input_name(i), column=n, dtype="float32", kind="any", sql="bigint" if i < 2 else "double")
        for i, n in zip(range(len(columns)), NAMES, strict=False)
    )
    made = Preprocess(pairs, [spec.column for spec in specs])
    arrays = {spec.name: column for spec, column in zip(specs, columns, strict=True)} | {
        name: values
        for name, values in table.arrays.items()
        if not name.startswith("x") and (name != LABEL or not implicit)
    }
    found = replace(table.columns, inputs=specs, preprocess=made, label=None if implicit else table.columns.label)
    sample = pairs({n: arrays[s.name][:2] for n, s in zip(NAMES, specs, strict=False)}, epoch=0, generator=None)
    return Table(arrays, replace(found, preprocess=replace(made, arguments=tuple(sample))))


def losses_of(module: Towers, rows: Table, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns each row's loss, sum of squares and weight, by torch's own functions."""
    assert rows.columns.preprocess is not None
    named = {spec.column: rows.arrays[spec.name] for spec in rows.columns.inputs}
    found = rows.columns.preprocess.function(named, epoch=epoch, generator=None)
    user, item = found["user"], found["item"].reshape(len(rows), -1)
    own = torch.where(user[:, None] < 0, 0.0, module.users.weight[user])
    theirs = module.items.weight[item]
    if module.user_layers is not None and module.item_layers is not None:
        own = own + module.user_layers(found["user_features"])
        theirs = theirs + module.item_layers(found["item_features"].reshape(len(rows), item.shape[1], -1))
    scores = torch.einsum("rd,rcd->rc", own[:, :-1], theirs[..., :-1]) + theirs[..., -1] + module.mean
    if LABEL in rows.arrays:
        scores = scores + own[:, -1:]
        losses = (scores[:, 0] - torch.from_numpy(rows.arrays[LABEL])) ** 2
    else:
        own = own[:, :-1]
        correction = torch.full((item.shape[1],), np.log((ITEMS - 1) / (item.shape[1] - 1)))
        correction[0] = 0
        target = torch.zeros(len(rows), dtype=torch.int64)
        losses = torch.nn.functional.cross_entropy(scores + correction, target, reduction="none")
    weight = torch.from_numpy(rows.arrays[WEIGHT]) if WEIGHT in rows.arrays else torch.ones(len(rows))
    return losses, (own**2).sum(1) + (theirs[:, 0] ** 2).sum(1), weight


def plain_training(table: Table, params: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    held_out = table.arrays[VALIDATION]
    rows, held = table.take(~held_out).by_key(), table.take(held_out)
    plan = SamplingPlan(rows=len(rows), batch_size=BATCH, seed=SEED)
    torch.manual_seed(SEED)
    module = Towers(**params)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
    history = []
    for epoch in range(EPOCHS):
        steps = plan.steps_of(0, len(rows), epoch)
        for step in range(plan.steps):
            losses, squares, weight = losses_of(module, rows.take(steps == step), epoch)
            optimizer.zero_grad()
            (((losses + PENALTY * squares) * weight).sum() / weight.sum()).backward()
            optimizer.step()
        with torch.no_grad():
            losses, _, weight = losses_of(module, held, None)
        history.append(float((losses * weight).sum() / weight.sum()))
    return module.state_dict(), history


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("implicit", "features", "strategy"),
    [(False, False, "ddp"), (True, True, "ddp"), (True, True, "zero3")],
)
def test_any_number_of_ranks_learns_what_one_plain_loop_learns(
    implicit: bool, features: bool, strategy: str, ranks: int
) -> None:
    table = ratings(implicit=implicit, features=features)
    params = (
        PARAMS
        | {"user_bias": not implicit}
        | ({"user_features": 1, "item_features": 1, "hidden": [5]} if features else {})
    )
    expected, history = plain_training(table, params)
    recipe = Recipe(
        module=Towers,
        module_params={**params, "sparse": strategy == "ddp"},
        loss=None,
        training_step=PairLoss(ITEMS if implicit else None, PENALTY),
        optimizer="Adagrad",
        learning_rate=0.1,
    )
    config = TrainConfig(task="generic", batch_size=BATCH, epochs=EPOCHS, seed=SEED, strategy=strategy)
    shuffled = table.shuffled(seed=ranks)
    state, metas = train_on(
        [part.batches(size=37 * ranks) for part in shuffled.parts(ranks)], train_job(table, recipe, config)
    )
    torch.testing.assert_close(state, expected, atol=1e-6, rtol=0)
    assert [record["val_loss"] for record in metas[0]["history"]] == pytest.approx(history, abs=1e-5)


ALPHA = 0.5


def choices(*, features: bool) -> Table:
    """Choices with ratings from 0 on, in groups of what a user chose in training, or in validation."""
    table = ratings(implicit=False, features=features)
    user, held_out = table.arrays[input_name(0)], table.arrays[VALIDATION]
    group = mix_words(user, held_out.astype(np.int64)).view(np.int64)
    rating = np.random.default_rng(4).integers(0, 4, len(table)).astype(np.float32)
    weight = (1 + ALPHA * np.log1p(rating)) * (rating > 0)
    _, place = np.unique(group, return_inverse=True)
    arrays = {
        **table.arrays,
        LABEL: rating,
        GROUP: group,
        WEIGHT: np.bincount(place, weight)[place].astype(np.float32),
    }
    weighed = Table.random(1, weighted=True).columns.weight
    return Table(arrays, replace(table.columns, groups=Groups(group="chosen_by"), weight=weighed))


def ranking_losses(module: Towers, rows: Table, catalogue: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's cross-entropy among all items with its penalty, and its weight, by torch's own functions."""
    assert rows.columns.preprocess is not None
    named = {spec.column: rows.arrays[spec.name] for spec in rows.columns.inputs}
    found = rows.columns.preprocess.function(named, epoch=None, generator=None)
    own = torch.where(found["user"][:, None] < 0, 0.0, module.users.weight[found["user"]])
    theirs = module.items.weight
    if module.user_layers is not None and module.item_layers is not None:
        own, theirs = own + module.user_layers(found["user_features"]), theirs + module.item_layers(catalogue)
    own = own[:, :-1]
    scores = own @ theirs[:, :-1].T + theirs[:, -1]
    losses = torch.nn.functional.cross_entropy(scores, found["item"], reduction="none")
    if module.training:
        often = torch.bincount(found["user"])[found["user"]]
        squares = (own**2).sum(1) * (20 / often) ** 0.5 + (theirs[found["item"]] ** 2).sum(1)
        losses = losses + PENALTY * squares
    rating = torch.from_numpy(rows.arrays[LABEL])
    return losses, (1 + ALPHA * rating.log1p()) * (rating > 0)


def plain_ranking(table: Table, params: dict[str, Any], catalogue: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    held_out, features = table.arrays[VALIDATION], torch.from_numpy(catalogue)
    rows, held = table.take(~held_out), table.take(held_out)
    users = np.unique(rows.arrays[GROUP].view(np.uint64))
    plan = SamplingPlan(rows=len(users), batch_size=8, seed=SEED)
    torch.manual_seed(SEED)
    module = Towers(**params)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
    history = []
    for epoch in range(EPOCHS):
        steps = plan.steps_of(0, len(users), epoch)
        for step in range(plan.steps):
            batch = rows.take(np.isin(rows.arrays[GROUP].view(np.uint64), users[steps == step]))
            losses, weight = ranking_losses(module.train(), batch, features)
            optimizer.zero_grad()
            ((losses * weight).sum() / weight.sum()).backward()
            optimizer.step()
        with torch.no_grad():
            losses, weight = ranking_losses(module.eval(), held, features)
        history.append(float((losses * weight).sum() / weight.sum()))
    return module.state_dict(), history


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("features", "strategy"), [(False, "ddp"), (True, "zero3")])
def test_any_number_of_ranks_ranks_all_items_as_one_plain_loop_over_pairs(
    features: bool, strategy: str, ranks: int
) -> None:
    table = choices(features=features)
    assert table.columns.preprocess is not None
    catalogue = IdIndex(table.columns.preprocess.function.items).features  # type: ignore[attr-defined]
    params = {**PARAMS, "user_bias": False, "ranks_all": True} | (
        {"user_features": 1, "item_features": 1, "hidden": [5]} if features else {}
    )
    expected, history = plain_ranking(table, params, catalogue)
    recipe = Recipe(
        module=Towers,
        module_params={**params, "sparse": strategy == "ddp"},
        loss=None,
        training_step=PairLoss(ITEMS, PENALTY, alpha=ALPHA, catalogue=catalogue),
        optimizer="Adagrad",
        learning_rate=0.1,
    )
    config = TrainConfig(task="generic", batch_size=8, epochs=EPOCHS, seed=SEED, strategy=strategy)
    shuffled = table.shuffled(seed=ranks)
    state, metas = train_on(
        [part.batches(size=37 * ranks) for part in parts(shuffled, ranks)], train_job(table, recipe, config)
    )
    # The loop adds up pairs in another order, and Adagrad's first steps divide small gradients of layers by their size.
    torch.testing.assert_close(state, expected, atol=5e-6 if features else 1e-6, rtol=0)
    assert [record["val_loss"] for record in metas[0]["history"]] == pytest.approx(history, abs=1e-5)
