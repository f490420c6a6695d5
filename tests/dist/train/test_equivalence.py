"""N ranks train what one process trains: the same batches, the same gradients, the same metrics."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import KEY, WEIGHT, input_name
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import WIDTH, Table
from tests.support.nets import Logarithm, Mlp, Normalised, Score, Seen, Spare, mean_cross_entropy
from tests.support.ranks import train_job, train_on
from tests.support.reference import Part, global_batches, validation_rows

ROWS, BATCH, EPOCHS, SEED = 1_001, 64, 3, 11
TOLERANCE = {"atol": 1e-5, "rtol": 0.0}

CASES = {
    "regression": Table.random(ROWS),
    "validated classification with weights": Table.random(ROWS, classes=3, weighted=True, validated=True),
}


def job_for(table: Table, **config: Any) -> TrainJob:
    classes = table.columns.classes
    recipe = Recipe(
        module=Mlp if classes else Score,
        loss="CrossEntropyLoss" if classes else "MSELoss",
        optimizer_params={"weight_decay": 0.05},
        learning_rate=3e-3,
    )
    values: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, **config}
    return train_job(table, recipe, TrainConfig(task="classification" if classes else "regression", **values))


def plain_training(table: Table, job: TrainJob) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    classes, held_out = table.columns.classes, validation_rows(table)
    torch.manual_seed(job.config.seed)
    module = Mlp() if classes else Score()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.05)

    def summed(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        output = module(part.x)
        loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
        return output, (loss(output, part.y, reduction="none") * part.w).sum()

    history = []
    for _, parts in groupby(global_batches(table, job.config), key=itemgetter(0)):
        sums = np.zeros(2)
        for _, part in parts:
            optimizer.zero_grad()
            loss = summed(part)[1]
            (loss / part.w.sum()).backward()
            optimizer.step()
            sums += [loss.item(), part.w.double().sum()]
        history.append({"loss": sums[0] / sums[1]})
        if len(held_out.x):
            with torch.no_grad():
                output, loss = summed(held_out)
            history[-1]["val_loss"] = float(loss / held_out.w.sum())
            if classes:
                right = output.argmax(1) == held_out.y
                history[-1]["val_accuracy"] = float((right * held_out.w).sum() / held_out.w.sum())
    return module.state_dict(), history


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return {name: plain_training(table, job_for(table)) for name, table in CASES.items()}


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_trains_what_one_plain_loop_trains(case: str, ranks: int, plain: dict[str, Any]) -> None:
    table = CASES[case].shuffled(seed=ranks)  # the rows arrive in another order each time
    expected, history = plain[case]
    state, metas = train_on([part.batches(size=37 * ranks) for part in table.parts(ranks)], job_for(table))
    assert_same_weights(state, expected)
    for record, metrics in zip(metas[0]["history"], history, strict=True):
        assert {name: record.get(name) for name in metrics} == pytest.approx(metrics, abs=1e-5)
        assert ("val_loss" in record) == ("val_loss" in metrics)


def test_normalised_modules_train_steps_of_one_row_with_a_loss_that_is_a_mean() -> None:
    table = Table.random(5, classes=3)
    job = job_for(table, epochs=2, batch_size=4)
    job = replace(job, recipe=replace(job.recipe, module=Normalised, loss=mean_cross_entropy))
    for ranks in (1, 2):
        state, metas = train_on([part.batches() for part in table.parts(ranks)], job)
        assert all(value.isfinite().all() for value in state.values())
        assert np.isfinite(metas[0]["history"][-1]["loss"])


@pytest.mark.parametrize("module", [Spare, Logarithm])
def test_a_module_that_one_process_trains_is_trained_by_several(module: type[nn.Module]) -> None:
    table = CASES["regression"]
    job = job_for(table, epochs=1, unused_parameters=module is Spare)
    job = replace(job, recipe=replace(job.recipe, module=module), placeholder=table.batches()[0].slice(7, 1))
    alone, _ = train_on([table.batches()], job)
    for partitions in ([part.batches() for part in table.parts(2)], [table.batches(), []]):
        assert_same_weights(train_on(partitions, job)[0], alone)


@pytest.mark.parametrize(
    ("rows", "batch", "ranks"),
    [
        pytest.param(2, 64, 4, id="fewer rows than ranks"),
        pytest.param(1, 1, 3, id="one row"),
        pytest.param(40, 1_000, 2, id="a batch larger than the data"),
    ],
)
def test_odd_sizes_train_the_same(rows: int, batch: int, ranks: int) -> None:
    # The first row's weight is zero otherwise.
    table = Table.random(rows, weighted=True).with_values(WEIGHT, [1.5])
    job = job_for(table, batch_size=batch)
    state, metas = train_on([part.batches() for part in table.parts(ranks)], job)
    assert_same_weights(state, plain_training(table, job)[0])
    assert metas[0]["steps_per_epoch"] == -(-rows // batch)


def test_without_shuffling_the_rows_are_trained_in_key_order() -> None:
    table = CASES["regression"]
    job = job_for(table, shuffle=False)
    state, _ = train_on([part.batches() for part in table.parts(3)], job)
    assert_same_weights(state, plain_training(table, job)[0])


def test_a_repeated_run_gives_the_same_weights_and_history_to_the_last_bit() -> None:
    table = CASES["validated classification with weights"]
    partitions = [part.batches() for part in table.parts(3)]
    (first, metas), (second, again) = (train_on(partitions, job_for(table)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    times = {"seconds": 0, "rows_per_second": 0, "data_wait_share": 0}
    assert [{**r, **times} for r in metas[0]["history"]] == [{**r, **times} for r in again[0]["history"]]


def test_ranks_train_the_rows_that_are_written_here(tmp_path: Path) -> None:
    rows = 11
    random = Table.random(rows)
    x = np.zeros((rows, WIDTH), np.float32)
    x[:, 0] = np.arange(rows)
    keys = (np.arange(rows, dtype=np.uint64) * np.uint64(2**64 // rows)).view(np.int64)
    table = replace(random, arrays={**random.arrays, input_name(0): x, KEY: keys})
    job = train_job(
        table,
        Recipe(module=Seen, module_params={"folder": str(tmp_path)}),
        TrainConfig(task="regression", batch_size=4, epochs=2, seed=7),
    )
    train_on([part.batches() for part in table.parts(2)], job)
    files = [path.read_text().splitlines() for path in sorted(tmp_path.iterdir())]
    steps = [sorted(int(number) for line in both for number in line.split()) for both in zip(*files, strict=True)]
    assert steps == [[1, 3, 7, 8], [0, 4, 6, 9], [2, 5, 10], [0, 3, 4, 9], [2, 5, 7, 10], [1, 6, 8]]
