"""Ranks train on the windows of their series what one process trains on all windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import GROUP, KEY, LABEL, ORDER, VALIDATION, WEIGHT, Columns, Groups, TensorSpec, Window
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.errors import ColumnError
from sparktorch.model.series.module import SeriesModule
from sparktorch.model.series.training import QuantileLoss, SeriesStep
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.ranks import train_job, train_on

CONTEXT, HORIZON, STEP = 6, 3, 2
WINDOW = Window(context=CONTEXT, horizon=HORIZON, step=STEP, known=(1,), even=("date", "UTC"))
QUANTILES = [0.2, 0.5, 0.9]
PARAMS: dict[str, Any] = {
    "module": "sparktorch.model.series.module:SeriesNetwork",
    "params": {"hidden": [9]},
    "context": CONTEXT,
    "horizon": HORIZON,
    "past": [(0.5, 2.0)],
    "future": [(0.0, 1.0), (1.0, 3.0)],
    "static": [(0.0, 1.0)],
}
CONFIG = TrainConfig(task="generic", batch_size=16, epochs=3, seed=5)


class Windows(NamedTuple):
    """All windows as tensors: what a plain loop trains on."""

    past: torch.Tensor
    future: torch.Tensor
    static: torch.Tensor
    label: torch.Tensor
    weight: torch.Tensor

    def take(self, index: Any) -> Windows:
        return Windows(*(part[index] for part in self))


def table(*, gaps: bool = False) -> Table:
    """Makes daily series of unequal lengths, whose last days validate; with `gaps`, some lack a day."""
    random = np.random.default_rng(0)
    lengths = [40, 25, 8, 31, 17, 3, 22]
    keys = random.integers(-(2**63), 2**63 - 1, len(lengths), dtype=np.int64)
    count = sum(lengths)
    target = random.normal(size=count).astype(np.float32) * 10 + 100
    arrays = {
        "x0": np.stack([target, random.normal(size=count)], 1).astype(np.float32),
        "x1": random.normal(size=(count, 2)).astype(np.float32),
        "x2": np.repeat(random.normal(size=(len(lengths), 1)), lengths, axis=0).astype(np.float32),
        LABEL: target,
        WEIGHT: random.uniform(0.1, 2, count).astype(np.float32),
        VALIDATION: np.concatenate([np.arange(length) >= length - 4 for length in lengths]),
        KEY: np.repeat(keys, lengths),
        GROUP: np.repeat(keys, lengths),
        ORDER: np.concatenate([np.arange(length) for length in lengths]) + 19_000,
    }
    names = (("x0", "past values", 2), ("x1", "values known ahead", 2), ("x2", "static values", 1))
    columns = Columns(
        inputs=tuple(TensorSpec(name=n, column=c, dtype="float32", shape=(width,)) for n, c, width in names),
        label=TensorSpec(name=LABEL, column="sold", dtype="float32"),
        weight=TensorSpec(name=WEIGHT, column="w", dtype="float32"),
        validation="late",
        groups=Groups(group="shop", order="day", window=WINDOW),
    )
    found = Table(arrays, columns).shuffled(3)
    if not gaps:
        return found
    missing = ((arrays[GROUP] == keys[0]) & (arrays[ORDER] == 19_015)) | (
        (arrays[GROUP] == keys[3]) & np.isin(arrays[ORDER], (19_004, 19_011))
    )
    return Table(arrays, replace(columns, drop_nulls=True)).take(~missing)


def windows(rows: Table) -> tuple[Windows, Windows]:
    """Returns the windows that train, in the order of their positions, and those that validate."""
    arrays, train, validation = rows.arrays, [], []
    for group in sorted(set(arrays[GROUP].tolist()), key=lambda key: key % 2**64):
        places = np.flatnonzero(arrays[GROUP] == group)
        places = places[np.argsort(arrays[ORDER][places])]
        for end in reversed(range(len(places), CONTEXT + HORIZON - 1, -STEP)):
            here = places[end - CONTEXT - HORIZON : end]
            context, horizon = here[:CONTEXT], here[CONTEXT:]
            marks = arrays[VALIDATION][horizon]
            if np.ptp(arrays[ORDER][here]) != len(here) - 1 or (marks.any() and not marks.all()):
                continue
            parts = (arrays["x0"][context], arrays["x1"][here], arrays["x2"][context], arrays[LABEL][horizon])
            (validation if marks.all() else train).append((*parts, arrays[WEIGHT][horizon].mean()))
    of = [[torch.from_numpy(np.stack(part)) for part in zip(*found, strict=True)] for found in (train, validation)]
    return Windows(*of[0]), Windows(*of[1])


def losses(module: nn.Module, found: Windows, quantiles: list[float]) -> torch.Tensor:
    """Returns the loss of each window: that of forecasts and labels in units of the context's deviation."""
    target = found.past[:, :, :1].double()
    mean, deviation = target.mean(1).float(), target.std(1, correction=0).float()
    forecast, label = module(*found[:3]), (found.label - mean) / deviation
    if not quantiles:
        return nn.functional.huber_loss((forecast - mean) / deviation, label, reduction="none").mean(1)
    over = label[..., None] - (forecast - mean[..., None]) / deviation[..., None]
    q = torch.tensor(quantiles)
    return torch.where(over > 0, q * over, (q - 1) * over).flatten(1).mean(1)


def plain(rows: Table, quantiles: list[float]) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    train, validation = windows(rows)
    plan = SamplingPlan(rows=len(train.label), batch_size=CONFIG.batch_size, seed=CONFIG.seed)
    torch.manual_seed(CONFIG.seed)
    module = SeriesModule(**PARAMS, quantiles=quantiles)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    history = []
    for epoch in range(CONFIG.epochs):
        steps, total = plan.steps_of(0, plan.rows, epoch), 0.0
        for step in range(plan.steps):
            batch = train.take(torch.from_numpy(steps == step))
            each = losses(module, batch, quantiles) * batch.weight
            optimizer.zero_grad()
            (each.sum() / batch.weight.sum()).backward()
            optimizer.step()
            total += each.sum().item()
        with torch.no_grad():
            each = losses(module, validation, quantiles) * validation.weight
        of_validation = float(each.sum() / validation.weight.sum())
        history.append({"loss": total / float(train.weight.sum()), "val_loss": of_validation})
    return module.state_dict(), history


def job(rows: Table, quantiles: list[float], config: TrainConfig = CONFIG) -> TrainJob:
    step = SeriesStep(QuantileLoss, {"quantiles": quantiles}) if quantiles else SeriesStep("HuberLoss")
    recipe = Recipe(module=SeriesModule, module_params={**PARAMS, "quantiles": quantiles}, training_step=step)
    return train_job(rows, recipe, config)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("quantiles", [[], QUANTILES])
@pytest.mark.parametrize("gaps", [False, True])
def test_ranks_train_on_windows_what_a_plain_loop_trains(ranks: int, quantiles: list[float], gaps: bool) -> None:
    rows = table(gaps=gaps)
    want, history = plain(rows, quantiles)
    state, metas = train_on([part.batches(size=11) for part in rows.parts(ranks)], job(rows, quantiles))
    torch.testing.assert_close(state, want, atol=1e-5, rtol=0)
    for record, metrics in zip(metas[0]["history"], history, strict=True):
        assert {name: record[name] for name in metrics} == pytest.approx(metrics, abs=1e-5)


def test_a_gap_is_told_with_the_days_around_it() -> None:
    rows = table(gaps=True)
    rows = replace(rows, columns=replace(rows.columns, drop_nulls=False))
    with pytest.raises(ColumnError, match=r"column 'day' has 3 uneven steps: in a group, after 2022-01-\d\d comes"):
        train_on([rows.batches()], job(rows, []))
