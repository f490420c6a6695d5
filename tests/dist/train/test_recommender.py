"""N ranks learn the vectors that one learns, with the same drawn items, or with all."""

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
from sparktorch.data.sampling.plan import mix_words
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


@pytest.mark.parametrize(
    ("kind", "features", "strategy"),
    [
        ("rated", False, "ddp"),
        ("drawn", True, "ddp"),
        ("drawn", True, "zero3"),
        ("ranked", False, "ddp"),
        ("ranked", True, "zero3"),
    ],
)
def test_any_number_of_ranks_learns_what_one_learns_with_dense_gradients(
    kind: str, features: bool, strategy: str
) -> None:
    ranked = kind == "ranked"
    table = choices(features=features) if ranked else ratings(implicit=kind == "drawn", features=features)
    params = {**PARAMS, "user_bias": kind == "rated", "ranks_all": ranked}
    if features:
        params |= {"user_features": 1, "item_features": 1, "hidden": [5]}
    pairs: Any = table.columns.preprocess
    catalogue = {"alpha": ALPHA, "catalogue": IdIndex(pairs.function.items).features} if ranked else {}
    step = PairLoss(None if kind == "rated" else ITEMS, PENALTY, **catalogue)

    def trained(ranks: int, strategy: str, *, sparse: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
        made: dict[str, Any] = {"module": Towers, "module_params": {**params, "sparse": sparse}, "loss": None}
        recipe = Recipe(**made, training_step=step, optimizer="Adagrad", learning_rate=0.1)
        batch = 8 if ranked else BATCH
        config = TrainConfig(task="generic", batch_size=batch, epochs=EPOCHS, seed=SEED, strategy=strategy)
        shuffled = table.shuffled(seed=ranks)
        split = parts(shuffled, ranks) if ranked else shuffled.parts(ranks)
        rows = [part.batches(size=37 * ranks) for part in split]
        state, metas = train_on(rows, train_job(table, recipe, config))
        return state, [record["val_loss"] for record in metas[0]["history"]]

    (state, losses), (expected, alone) = trained(3, strategy, sparse=strategy == "ddp"), trained(1, "ddp", sparse=False)
    # Pairs are added up in another order, and Adagrad's first steps divide small gradients of layers by their size.
    torch.testing.assert_close(state, expected, atol=5e-6 if features else 1e-6, rtol=0)
    assert losses == pytest.approx(alone, abs=1e-5)
