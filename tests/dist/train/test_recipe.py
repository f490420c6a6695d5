"""Training steps, several outputs, and losses that are no means: on N ranks as in a plain torch loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch.base.world import World
from sparktorch.data.columns import LABEL, TensorSpec
from sparktorch.errors import ModuleError
from sparktorch.train.recipe.loss import Means
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Mlp, NamedPair, Normalised, Pair, Score, mean_cross_entropy
from tests.support.ranks import in_group, preload, train_on
from tests.support.reference import epoch_batches, split_rows, tensors
from tests.support.small import small_job, trained

preload("sklearn.utils.class_weight")  # ranks import this module, for its training steps

ROWS, EPOCHS, SEED = 301, 3, 11
NUMBERS = Table.random(ROWS, weighted=True)
CLASSES = Table.random(ROWS, classes=3, weighted=True, validated=True)
UNWEIGHTED = Table.random(ROWS, classes=3, validated=True)
TOLERANCE = {"atol": 1e-5, "rtol": 0.0}


def job_for(table: Table, config: dict[str, Any] | None = None, **recipe: Any) -> TrainJob:
    return small_job(table, recipe, **(config or {}))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_frozen_parameters_come_back_to_the_last_bit(strategy: str) -> None:
    job = job_for(NUMBERS, {"strategy": strategy}, freeze=["*", "!layers.2.*", "!layers.0.bias"], learning_rate=0.01)
    initial, (state, _) = job.recipe.build_module(SEED).state_dict(), trained(NUMBERS, job, 2)
    assert [name for name in initial if torch.equal(state[name], initial[name])] == ["layers.0.weight"]


# Training steps


def noisy_step(module: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    x, y = batch.inputs[0], batch.label
    assert len(x) == len(y) == batch.rows
    assert batch.weight is None or len(batch.weight) == batch.rows
    first, second = module(x), module(-x)
    losses = nn.functional.cross_entropy(first, y, reduction="none") + 0.5 * (second**2).mean(1)
    right = (first.argmax(1) == y).float()
    return losses, {"right": right, "size": second.detach().abs().mean(1)}


def mean_step(module: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    losses, metrics = noisy_step(module, batch)
    return losses.mean(), {"right": metrics["right"].mean().item(), "size": metrics["size"]}


def _stepped(table: Table, job: TrainJob) -> tuple[nn.Module, list[dict[str, float]]]:
    torch.manual_seed(SEED)
    module, history = Mlp(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)

    def terms(rows: Table) -> torch.Tensor:
        x, y, w = tensors(rows)
        out, second = module(x), module(-x)
        loss = nn.functional.cross_entropy(out, y, reduction="none") + 0.5 * (second**2).mean(1)
        return torch.stack([loss * w, (out.argmax(1) == y) * w, second.abs().mean(1) * w, w])

    for epoch in range(job.config.epochs):
        sums = torch.zeros(4)
        for rows in epoch_batches(table, job.config, epoch):
            optimizer.zero_grad()
            found = terms(rows).sum(1)
            (found[0] / found[3]).backward()
            optimizer.step()
            sums += found.detach()
        with torch.no_grad():
            held_out = terms(split_rows(table)[1]).sum(1)
        record = {}
        for prefix, total in (("train", sums), ("val", held_out)):
            loss, right, size = (total[:3] / total[3]).tolist()
            record |= {f"{prefix}_right": right, f"{prefix}_size": size}
            record["loss" if prefix == "train" else "val_loss"] = loss
        history.append(record)
    return module, history


@pytest.mark.parametrize(
    ("step", "table", "config"),
    [
        (noisy_step, CLASSES, {"strategy": "zero3", "micro_batch_size": 5}),
        ("tests.dist.train.test_recipe:noisy_step", UNWEIGHTED, {}),
        (mean_step, UNWEIGHTED, {"accumulation_steps": 3}),
    ],
)
def test_a_training_step_trains_and_measures_what_a_plain_loop_does(
    step: Any, table: Table, config: dict[str, Any]
) -> None:
    job = job_for(table, config, loss=None, training_step=step, learning_rate=0.01)
    module, expected = _stepped(table, job)
    first, second = (part.batches() for part in table.parts(2))
    for parts in ([table.batches()], [first, [], second]):
        state, metas = train_on(parts, job)
        history = metas[0]["history"]
        torch.testing.assert_close(state, module.state_dict(), **TOLERANCE)
        for record, metrics in zip(history, expected, strict=True):
            assert {name: record[name] for name in metrics} == pytest.approx(metrics, abs=1e-5)
        assert history[-1]["val_accuracy"] == pytest.approx(expected[-1]["val_right"], abs=1e-5)


@pytest.mark.parametrize(
    ("weighted", "recipe"),
    [
        (True, {"loss": None, "training_step": noisy_step}),
        (False, {"loss": None, "training_step": mean_step}),
        (False, {"loss": mean_cross_entropy}),
    ],
    ids=["step", "mean of a step", "mean"],
)
def test_steps_of_one_row_are_filled_up_for_a_normalised_module(weighted: bool, recipe: dict[str, Any]) -> None:
    table = Table.random(7, classes=3, weighted=weighted)
    job = job_for(table, {"batch_size": 3, "epochs": 2}, module=Normalised, **recipe)
    for ranks in (1, 3):
        state, history = trained(table, job, ranks)
        assert all(value.isfinite().all() for value in state.values())
        assert np.isfinite(history[-1]["loss"])
        assert 0 <= history[-1].get("train_right", 0) <= 1


def _means(world: World) -> dict[str, float]:
    means = Means("train_")
    for value in (2.0, 4.0):
        means.add({"both": (value * world.rank, 1.0), f"of_{world.rank}": (value, 2.0)})
    return means.over_ranks(world)


def test_metrics_that_only_some_ranks_meet_are_means_over_the_rows_of_their_batches() -> None:
    assert in_group(2, _means) == [{"train_both": 1.5, "train_of_0": 1.5, "train_of_1": 1.5}] * 2


IGNORING = UNWEIGHTED.with_values(LABEL, np.where(np.arange(ROWS) % 5, UNWEIGHTED.arrays[LABEL], -100))


def ignoring(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, label.long(), ignore_index=-100)


def ignoring_step(module: nn.Module, batch: Any) -> torch.Tensor:
    return ignoring(module(batch.inputs[0]), batch.label)


def sum_step(module: nn.Module, batch: Any) -> torch.Tensor:
    return module(batch.inputs[0]).square().mean(1).sum()


def contrast_step(module: nn.Module, batch: Any) -> torch.Tensor:
    output = module(batch.inputs[0])
    return nn.functional.cross_entropy(output @ output.T, torch.arange(len(output))).expand(len(output))


def random_step(module: nn.Module, batch: Any) -> torch.Tensor:
    x = batch.inputs[0]
    return (module(x + torch.randn_like(x)) ** 2).mean()


@pytest.mark.parametrize(
    ("recipe", "config", "ranks"),
    [
        ({"loss": ignoring}, {"batch_size": 2}, 2),
        ({"training_step": ignoring_step}, {"precision": "bf16"}, 1),
        ({"training_step": ignoring_step}, {"strategy": "mesh", "strategy_params": {"pipeline": 2}}, 2),
        ({"training_step": sum_step}, {"accumulation_steps": 4, "strategy": "zero3"}, 2),
    ],
)
def test_a_loss_that_is_no_mean_over_rows_is_refused_before_a_step(
    recipe: dict[str, Any], config: dict[str, Any], ranks: int
) -> None:
    job = job_for(IGNORING, {**config, "task": "generic"}, **{"loss": None, **recipe})
    with pytest.raises(ModuleError, match="is no mean over rows: it is") as caught:
        trained(IGNORING, replace(job, columns=replace(job.columns, classes=None)), ranks)
    assert caught.value.where["param"] == ("trainingStep" if "training_step" in recipe else "loss")
    assert "step" not in caught.value.where
    assert "reduction='none'" in caught.value.hint


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ({"training_step": contrast_step}, {"batch_size": 16}),
        ({"training_step": random_step}, {}),
        ({"training_step": mean_step, "module": Normalised}, {"precision": "bf16", "strategy": "zero3"}),
    ],
)
def test_a_loss_that_is_a_mean_or_cannot_be_compared_is_left_alone(
    recipe: dict[str, Any], config: dict[str, Any]
) -> None:
    job = job_for(UNWEIGHTED, {"epochs": 1, **config}, **{"loss": None, **recipe})
    assert trained(UNWEIGHTED, job, 2)[1]


# Several outputs


def two_losses(output: Any, label: torch.Tensor) -> torch.Tensor:
    left, total = (output["left"], output["total"]) if isinstance(output, dict) else output
    return (left**2).mean(1) + (total - label) ** 2


@pytest.mark.parametrize(("module", "split"), [(Pair, {"micro_batch_size": 5}), (NamedPair, {})])
def test_a_loss_of_several_outputs_trains_as_in_a_plain_loop(module: type[nn.Module], split: dict[str, int]) -> None:
    scale = np.linspace(0.5, 2, ROWS, dtype=np.float32)
    columns = (*NUMBERS.columns.inputs, TensorSpec(name="x1", column="scale", dtype="float32"))
    table = Table({**NUMBERS.arrays, "x1": scale}, replace(NUMBERS.columns, inputs=columns))
    job = job_for(table, split, module=module, loss=two_losses, optimizer="SGD", learning_rate=0.05)

    torch.manual_seed(SEED)
    net = module()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(EPOCHS):
        for rows in epoch_batches(table, job.config, epoch):
            x, y, w = tensors(rows)
            output = net(x, torch.from_numpy(rows.arrays["x1"]))
            left, total = output.values() if isinstance(output, dict) else output
            optimizer.zero_grad()
            (((left**2).mean(1) + (total - y) ** 2) * w).sum().div(w.sum()).backward()
            optimizer.step()
    expected = net.state_dict()
    for ranks in (1, 3):
        torch.testing.assert_close(trained(table, job, ranks)[0], expected, **TOLERANCE)
    without_rows: Sequence[Any] = [table.batches(), []]
    torch.testing.assert_close(train_on(without_rows, job)[0], expected, **TOLERANCE)


def last_layer_alone(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Returns an optimizer that leaves out all but the last layer."""
    return torch.optim.SGD(list(parameters)[-2:], lr=lr)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_parameters_that_the_optimizer_leaves_out_neither_add_up_nor_are_clipped(ranks: int) -> None:
    parts = [part.batches() for part in NUMBERS.parts(ranks)]
    clipped = {"clip_norm": 0.5}
    options: dict[str, Any] = {"optimizer": last_layer_alone, "learning_rate": 0.1}
    state, metas = train_on(parts, job_for(NUMBERS, clipped, **options))
    frozen, others = train_on(parts, job_for(NUMBERS, clipped, **options, freeze=["layers.0.*"]))
    torch.testing.assert_close(state, frozen, **TOLERANCE)
    norms, wanted = ([record["gradient_norm"] for record in meta[0]["history"]] for meta in (metas, others))
    assert norms == pytest.approx(wanted, abs=1e-5)


class Halved(Score):
    """Computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16())


def wide_step(module: nn.Module, batch: Any) -> torch.Tensor:
    output = module(*batch.inputs)
    assert output.dtype == torch.float32
    return (output - batch.label) ** 2


def wide_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    assert output.dtype == torch.float32
    return (output - label) ** 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_of_modules_in_half_precision_are_computed_in_float32(ranks: int) -> None:
    sharded = {"strategy": "zero3", "strategy_params": {"param_dtype": "bf16", "min_parameters": 8}}
    parts = [part.batches() for part in NUMBERS.parts(ranks)]
    for config, recipe in (
        (sharded, {"loss": wide_loss}),
        (sharded, {"loss": None, "training_step": wide_step}),
        ({}, {"loss": wide_loss, "module": Halved}),
    ):
        _, metas = train_on(parts, job_for(NUMBERS, config, **recipe))
        assert len(metas[0]["history"]) == EPOCHS
