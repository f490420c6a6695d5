"""Any number of ranks trains on the windows of series what one process trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import GROUP, KEY, LABEL, ORDER, VALIDATION, WEIGHT, Columns, Groups, TensorSpec, Window
from sparktorch.ml.fit.summary import best_validation, ending
from sparktorch.tasks.series.loss import QuantileLoss, SeriesStep
from sparktorch.tasks.series.network import SeriesModule
from sparktorch.train.recipe.recipe import Recipe
from tests.support.frames import Table
from tests.support.ranks import train_job, train_on

PARAMS: dict[str, Any] = {
    "module": "sparktorch.tasks.series.network:SeriesNetwork",
    "params": {"hidden": [9]},
    "context": 6,
    "horizon": 3,
    "past": [(0.5, 2.0)],
    "future": [(0.0, 1.0), (1.0, 3.0)],
    "static": [(0.0, 1.0), (0.0, 1.0)],
    "categories": [None, ["a", "b"]],
    "season": 2,
}
QUANTILES = [0.2, 0.5, 0.9]


def table(*, gaps: bool) -> Table:
    """Makes daily series of unequal lengths, whose last days validate; with `gaps`, two lack days, as rows dropped."""
    random = np.random.default_rng(0)
    lengths = [40, 25, 8, 31, 17, 3, 22]
    keys = random.integers(-(2**63), 2**63 - 1, len(lengths), dtype=np.int64)
    days, count = np.concatenate([np.arange(length) for length in lengths]), sum(lengths)
    target = random.normal(size=count).astype(np.float32) * 10 + 100
    arrays = {
        "x0": np.stack([target, random.normal(size=count)], 1).astype(np.float32),
        "x1": random.normal(size=(count, 2)).astype(np.float32),
        "x2": np.repeat(np.stack([random.normal(size=7), np.arange(7) % 4], 1), lengths, axis=0).astype(np.float32),
        LABEL: target,
        WEIGHT: random.uniform(0.1, 2, count).astype(np.float32),
        VALIDATION: days >= np.repeat(lengths, lengths) - 4,
        KEY: np.repeat(keys, lengths),
        GROUP: np.repeat(keys, lengths),
        ORDER: days + 19_000,
    }
    names = (("x0", "past values", 2), ("x1", "values known ahead", 2), ("x2", "static values", 2))
    window = Window(context=6, horizon=3, step=2, known_ahead=(1,), even=("date", "UTC"))
    columns = Columns(
        inputs=tuple(TensorSpec(name=n, column=c, dtype="float32", shape=(width,)) for n, c, width in names),
        label=TensorSpec(name=LABEL, column="sold", dtype="float32"),
        weight=TensorSpec(name=WEIGHT, column="w", dtype="float32"),
        validation="late",
        groups=Groups(group="shop", order="day", window=window),
        drop_nulls=gaps,
    )
    missing = gaps & np.isin(np.arange(count), (15, 73 + 4, 73 + 11))
    return Table(arrays, columns).take(~missing).shuffled(3)


@pytest.mark.parametrize(("quantiles", "gaps"), [([], False), (QUANTILES, True)])
def test_ranks_train_on_windows_what_one_process_trains(quantiles: list[float], gaps: bool) -> None:
    rows = table(gaps=gaps)
    step = SeriesStep(QuantileLoss, {"quantiles": quantiles}) if quantiles else SeriesStep("HuberLoss")
    start = {"hidden": [9], **({"smoothing": 0.3, "slope": 0.5} if quantiles else {})}
    params = {**PARAMS, "params": start, "quantiles": quantiles}
    recipe = Recipe(module=SeriesModule, module_params=params, training_step=step)
    job = train_job(rows, recipe, TrainConfig(task="generic", batch_size=16, epochs=3, seed=5))
    want, (alone,) = train_on([rows.batches()], job)
    state, metas = train_on([part.batches(size=11) for part in rows.parts(3)], job)
    torch.testing.assert_close(state, want, atol=1e-5, rtol=0)
    for record, expected in zip(metas[0]["history"], alone["history"], strict=True):
        for name in ("loss", "val_loss"):
            assert record[name] == pytest.approx(expected[name], abs=1e-5)


def test_a_first_rank_without_windows_validates_and_returns_what_one_process_does() -> None:
    rows = table(gaps=False)
    recipe = Recipe(module=SeriesModule, module_params=PARAMS, training_step=SeriesStep("L1Loss"), learning_rate=0.1)
    job = train_job(rows, recipe, TrainConfig(task="generic", batch_size=16, epochs=2, seed=5))
    want, (alone,) = train_on([rows.batches()], job)
    state, (found, *_) = train_on([[], rows.batches()], job)
    torch.testing.assert_close(state, want, atol=1e-5, rtol=0)
    losses, expected = ([record["val_loss"] for record in meta["history"]] for meta in (found, alone))
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] != pytest.approx(naive_loss(rows), abs=1e-3)


@pytest.mark.parametrize(("ranks", "unit"), [(1, "epoch"), (3, "step")])
def test_a_training_that_is_never_better_returns_the_last_season_whose_loss_is_the_baseline(
    ranks: int, unit: Any
) -> None:
    rows = table(gaps=False)
    rows.arrays[WEIGHT][:] = 1
    recipe = Recipe(
        module=SeriesModule,
        module_params=PARAMS,
        training_step=SeriesStep("L1Loss"),
        learning_rate=10.0,
    )
    how: dict[str, Any] = {"patience": 3, "validates_untrained": True, "validation_unit": unit}
    config = TrainConfig(task="generic", batch_size=16, epochs=20, seed=5, **how)
    state, (found, *_) = train_on([part.batches() for part in rows.parts(ranks)], train_job(rows, recipe, config))
    first, *others = history = found["history"]
    losses = [one["val_loss"] for record in history for one in record.get("validations", [record])]
    assert len(losses) == 3
    assert min(losses) > first["untrained"]["val_loss"]
    assert all("untrained" not in record for record in others)
    assert ending(history, config) == "patience: 3 validations without a better val_loss"
    assert best_validation(history, config) == {"epoch": 0, **first["untrained"]}
    module = SeriesModule(**PARAMS)
    module.load_state_dict(state)
    past, future, static = torch.rand(4, 6, 2), torch.rand(4, 9, 2), torch.ones(4, 6, 2)
    torch.testing.assert_close(module.eval()(past, future, static), past[:, [4, 5, 4], 0])
    assert first["untrained"]["val_loss"] == pytest.approx(naive_loss(rows), rel=1e-5)


def naive_loss(rows: Table) -> float:
    """Returns the mean of the last season's scaled errors in the windows that are held out as a whole."""
    losses = []
    for group in np.unique(rows.arrays[GROUP]):
        of = np.flatnonzero(rows.arrays[GROUP] == group)
        of = of[rows.arrays[ORDER][of].argsort()]
        sold, late = (rows.arrays[name][of].astype(float) for name in (LABEL, VALIDATION))
        for start in range(len(of) - 9, -1, -2):
            past, after = sold[start : start + 6], sold[start + 6 : start + 9]
            if late[start + 6 : start + 9].all():
                losses.append(np.abs(past[[4, 5, 4]] - after).mean() / past.std())
    return float(np.mean(losses))
