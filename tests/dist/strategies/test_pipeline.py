"""A module whose layers are on ranks one after another trains as one process does, on any mesh and schedule."""

from __future__ import annotations

import signal
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn

from sparktorch import Callback
from sparktorch.base.batch import Batch
from sparktorch.base.config import CheckpointConfig
from sparktorch.data.columns import VALIDATION, TensorSpec
from sparktorch.errors import ModuleError
from sparktorch.train.recipe.dry_run import dry_run
from sparktorch.train.strategies.mesh import MeshOptions
from sparktorch.train.strategies.registry import check_module
from sparktorch.worker import TrainJob
from tests.dist.strategies.test_strategies import CONTRARY, FEW_STEPS, PARTED, TABLE, job_for, plain
from tests.dist.train import test_huggingface as texts
from tests.support.attention_nets import Encoder
from tests.support.frames import replaced
from tests.support.nets import Chain, Paired, Unit
from tests.support.ranks import control_server, run_ranks, train_on
from tests.support.resume import OwnSteps
from tests.support.staged_nets import normed
from tests.support.tiny_transformers import causal, llama, mixtral

LANDING = pytest.mark.landing
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "two stages": (2, {"pipeline": 2}),
    "all forward passes first": (2, {"pipeline": 2, "schedule": "gpipe", "micro_batches": 3}),
    "one after another": (2, {"pipeline": 2, "schedule": "gpipe", "micro_batches": 1}),
    "two stages of each rank": (2, {"pipeline": 2, "stages_per_rank": 2, "micro_batches": 4}),
    "four stages": (4, {"pipeline": 4, "micro_batches": 4}),
    "all but copies": (8, {"pipeline": 2, "shard": 2, "tensor": 2, "micro_batches": 2}),
}


def pipeline_job(sizes: dict[str, Any], *, recipe: dict[str, Any] | None = None, **config: Any) -> TrainJob:
    return job_for(
        recipe={"module": Paired, **(recipe or {})}, strategy="mesh", strategy_params={**PARTED, **sizes}, **config
    )


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, torch.Tensor], float]:
    return plain(of=Paired)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "two stages" else [LANDING]) for case in MESHES]
)
def test_ranks_train_what_one_plain_loop_trains(case: str, expected: tuple[dict[str, torch.Tensor], float]) -> None:
    ranks, sizes = MESHES[case]
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], pipeline_job(sizes))
    torch.testing.assert_close(state, expected[0], atol=1e-5, rtol=0)
    record = metas[0]["history"][-1]
    assert record["val_loss"] == pytest.approx(expected[1], abs=1e-5)
    stages, count = MeshOptions(**sizes).stages, MeshOptions(**sizes).count
    ranks = sizes["pipeline"]
    wait = (ranks - 1) * ranks / stages
    assert record["pipeline_bubble_formula"] == pytest.approx(wait / (count + wait))
    assert 0 < record["pipeline_bubble"] < 1


@LANDING
def test_ranks_without_rows_take_part_and_change_nothing(expected: tuple[dict[str, torch.Tensor], float]) -> None:
    held_out = TABLE.arrays[VALIDATION]
    parts = [TABLE.take(~held_out).batches(), [], TABLE.take(held_out).batches(), []]
    job = pipeline_job({"pipeline": 2, "data": 2, "micro_batches": 2})
    job = replace(job, placeholder=TABLE.batches()[0].slice(7, 1))
    state, metas = train_on(parts, job)
    torch.testing.assert_close(state, expected[0], atol=1e-5, rtol=0)
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(expected[1], abs=1e-5)


@LANDING
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ({"pipeline": 2, "shard": 2}, {"clip_norm": 0.05, "ema_decay": 0.9, "patience": 1, "epochs": 9}),
        ({"pipeline": 4}, {**FEW_STEPS, "clip_norm": 0.05, "clip_value": 0.01, "micro_batch_size": 9}),
    ],
)
def test_gradients_are_clipped_as_those_of_one_model_averages_are_kept_and_training_stops_early(
    sizes: dict[str, Any], config: dict[str, Any]
) -> None:
    groups = [{"params": "first.*", "lr": 1e-2}, {"params": ["norm.*", "second.0.*"], "weight_decay": 0.0}]
    recipe = {"parameter_groups": groups, "freeze": ["second.3.bias"]}
    parts = [part.batches() for part in CONTRARY.parts(4)]
    sizes = {**sizes, "micro_batches": sizes["pipeline"]}
    mine, metas = train_on(parts, pipeline_job(sizes, recipe=recipe, **config))
    other, expected = train_on([CONTRARY.batches()], job_for(recipe={"module": Paired, **recipe}, **config))
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    assert [len(found[0]["history"]) for found in (metas, expected)] == ([2, 2] if "patience" in config else [1, 1])
    norms = [found[0]["history"][-1]["gradient_norm"] for found in (metas, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@LANDING
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"pipeline": 2}, {"pipeline": 2}),
        ({"pipeline": 2, "data": 2}, {"shard": 2}),
        ({"pipeline": 4}, {"pipeline": 2, "shard": 2}),
    ],
)
def test_a_killed_training_goes_on_on_the_same_mesh_and_on_another(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    same = before == after
    ranks = 2 if same else 4
    parts = [part.batches() for part in TABLE.parts(ranks)]
    few = {**FEW_STEPS, "accumulation_steps": 2 if same else 1}

    def job(sizes: dict[str, Any], folder: str, **kill: int) -> TrainJob:
        (tmp_path / folder).mkdir(exist_ok=True)
        checkpoint = CheckpointConfig(directory=str(tmp_path / folder / "saved"), unit="step", interval=1, owner="me")
        params = {"dropout": 0.3 if same else 0.0}
        recipe = {"module": Chain, "module_params": params, "callbacks": [OwnSteps(tmp_path / folder, **kill)]}
        if "pipeline" in sizes:
            sizes = {**sizes, "micro_batches": sizes["pipeline"]}
        return replace(pipeline_job(sizes, recipe=recipe, patience=5, **few), checkpoint=checkpoint)

    with control_server() as server:
        ended = run_ranks(server, parts, job(before, "killed", rank=ranks - 1, step=3))
    assert any(rank.exitcode == -signal.SIGKILL for rank in ended)
    state, _ = train_on(parts, job(after, "killed"))
    assert int((tmp_path / "killed" / "steps-0").read_text()) < 5  # those before the kill are not taken again
    expected = train_on(parts, job(before, "whole"))[0] if same else plain(of=Chain, batch_size=64, epochs=1)[0]
    torch.testing.assert_close(state, expected, atol=0 if same else 1e-5, rtol=0)


class Tabled(nn.Module):
    """Numbers choose rows of a table, between layers; a stage has a parameter of its own, which is another's alias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True))
        self.out = nn.Linear(8, 1)
        self.again = self.out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unit, *others = self.stages()
        found = unit(x)
        for unit in others:
            found = unit(*found) if isinstance(found, tuple) else unit(found)
        return found

    def stages(self) -> list[nn.Module]:
        def enter(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            chosen = (x > 0).sum(1)
            return self.table(chosen), chosen

        def body(*parts: nn.Module) -> Unit:
            layers = nn.Sequential(*parts)
            return Unit(lambda found, chosen: (layers(found), chosen), layers)

        def last(found: torch.Tensor, chosen: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(found * gain).squeeze(-1) * chosen
            return out

        return [
            Unit(enter, self.table),
            body(*self.body[:1]),
            body(*self.body[1:]),
            Unit(last, self.out, gain=self.gain),
        ]


@LANDING
@pytest.mark.parametrize(
    ("module", "split", "options"),
    [
        (normed, ["2"], {}),
        (Tabled, ["body.1"], {}),
        (Encoder, ["encoder.layers.1", "last"], {}),
        # Values that skip stages, and parameters between layers.
        (
            partial(Chain, skips=True, unused=80),
            ["layers.1", "layers.2", "out"],
            {"wrap_classes": ["Linear"], "activation_checkpointing": True},
        ),
    ],
)
def test_a_module_is_cut_where_split_says(module: Any, split: list[str], options: dict[str, Any]) -> None:
    ranks = len(split) + 1
    parts = [part.batches() for part in TABLE.parts(ranks)]
    recipe = {"module": module, "optimizer": "SGD", "optimizer_params": {"weight_decay": 0.1}}
    sizes = {"pipeline": ranks, "split": split, "micro_batches": max(3, ranks), **options}
    mine, metas = train_on(parts, pipeline_job(sizes, recipe=recipe, **FEW_STEPS))
    other, expected = train_on([TABLE.batches()], job_for(recipe=recipe, **FEW_STEPS))
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    records = [found[0]["history"][-1] for found in (metas, expected)]
    assert records[0]["val_loss"] == pytest.approx(records[1]["val_loss"], rel=1e-3)


class Sign(Enum):
    PLUS = 1.0
    MINUS = -1.0


class Frozen(Chain):
    """Keeps its layers in evaluation, and computes with numbers that a callback changes."""

    def __init__(self) -> None:
        super().__init__(
            dropout=0.5, unused=40
        )  # so large that the parts of `layers` are small, and called as they are
        self.factor, self.options, self.sign = 1.0, {"scale": 1.0}, Sign.PLUS

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.layers.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(x))

    def scaled(self, out: torch.Tensor) -> torch.Tensor:
        return out * self.factor * self.options["scale"] * (1.0 if self.sign is Sign.PLUS else -1.0)

    def stages(self) -> list[nn.Module]:
        return [*super().stages(), Unit(self.scaled)]


class Growing(Callback):
    ranks = "all"

    def on_epoch_end(self, context: Any, record: Any) -> None:
        context.module.factor += 0.5
        context.module.options["scale"] *= 0.8
        context.module.sign = Sign.MINUS


@LANDING
def test_modes_and_numbers_that_a_module_and_callbacks_set_count() -> None:
    parts = [part.batches() for part in TABLE.parts(2)]
    recipe = {"module": Frozen, "optimizer": "SGD", "optimizer_params": {"lr": 0.05}, "callbacks": [Growing()]}
    few = {**FEW_STEPS, "epochs": 2}  # the second with what was set after the first
    mine, _ = train_on(parts, pipeline_job({"pipeline": 2, "micro_batches": 2}, recipe=recipe, **few))
    other, _ = train_on([TABLE.batches()], job_for(recipe=recipe, **few))
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)


class Twofold(nn.Module):
    """Returns the share of units that neither stage drops, times 4."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(5, 64), nn.Linear(64, 64), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        first = first * 0 + self.drop(torch.ones_like(first))
        second = self.second(first) * 0
        return (first * (second + self.drop(torch.ones_like(second)))).mean(1)

    def stages(self) -> list[nn.Module]:
        def first(x: torch.Tensor) -> torch.Tensor:
            found = self.first(x)
            return found * 0 + self.drop(torch.ones_like(found))

        def second(first: torch.Tensor) -> torch.Tensor:
            found = self.second(first) * 0
            return (first * (found + self.drop(torch.ones_like(found)))).mean(1)

        return [Unit(first, self.first, self.drop), Unit(second, self.second, self.drop)]


def outputs(module: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    found = module(batch.inputs[0])
    return found, {"output": found.detach()}


@LANDING
def test_stages_drop_other_activations() -> None:
    recipe = {"module": Twofold, "loss": None, "training_step": outputs}
    parts = [part.batches() for part in TABLE.parts(2)]
    sizes = {"pipeline": 2, "split": ["second"], "micro_batches": 2}
    _, metas = train_on(parts, pipeline_job(sizes, recipe=recipe, **FEW_STEPS))
    assert metas[0]["history"][-1]["train_output"] == pytest.approx(1, abs=0.2)  # 2 if both drop the same


@LANDING
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Chain, {}),
        (Chain, {"stages_per_rank": 2}),
        (Encoder, {"schedule": "gpipe"}),  # of which torch has fused kernels, for evaluation
    ],
)
def test_with_bfloat16_stages_pass_on_what_one_process_computes(module: Any, options: dict[str, Any]) -> None:
    parts = [part.batches() for part in TABLE.parts(2)]
    recipe = {"module": module, "optimizer": "SGD", "optimizer_params": {}}
    config = {**FEW_STEPS, "batch_size": 32, "precision": "bf16"}
    sizes = {"pipeline": 2, "micro_batches": 4, **options}
    mine, metas = train_on(parts, pipeline_job(sizes, recipe=recipe, **config))
    other, expected = train_on([TABLE.batches()], job_for(recipe=recipe, **config))
    torch.testing.assert_close(mine, other, atol=2e-4, rtol=0)
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(expected[0]["history"][-1]["val_loss"], rel=1e-3)


def squares(module: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    assert batch.label is not None
    error = module(batch.inputs[0]) - batch.label.float()
    return error**2, {"error": error.abs()}


def penalised(module: nn.Module, batch: Batch) -> torch.Tensor:
    error, _ = squares(module, batch)
    return error + sum(p.square().sum() for p in module.parameters())


def layers_penalised(module: Any, batch: Batch) -> torch.Tensor:
    error, _ = squares(module, batch)
    return error + sum(p.weight.square().sum() for p in module.children() if isinstance(p, nn.LayerNorm))


def twice(module: nn.Module, batch: Batch) -> torch.Tensor:
    assert batch.label is not None
    found: torch.Tensor = module(batch.inputs[0]) + module(-batch.inputs[0]) - batch.label.float()
    return found


def noisy(module: nn.Module, batch: Batch) -> torch.Tensor:
    assert batch.label is not None
    inputs = batch.inputs[0]
    found: torch.Tensor = (module(inputs + torch.randn_like(inputs)) - batch.label.float()) ** 2
    return found


class Encoding(Paired):
    """Has methods and a property that call it, or its parts."""

    factor = 2.0

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.norm(self.first(x))).squeeze(-1)
        return found

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self(x) * self.factor
        return found


def scaled(module: Any, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    assert batch.label is not None
    error = module.scaled(batch.inputs[0]) - batch.label.double()
    return error**2, {"error": error.abs()}


def encoded(module: Any, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = module.encode(batch.inputs[0]) - batch.label
    return found**2


def paired(module: Any, batch: Batch) -> torch.Tensor:
    one, other = module(torch.cat([batch.inputs[0], -batch.inputs[0]])).chunk(2)
    found: torch.Tensor = (one - batch.label) ** 2 + (one - other) ** 2
    return found


class Losing(Encoding):
    def forward(self, x: torch.Tensor, label: torch.Tensor | None = None) -> Any:
        out = super().forward(x)
        return out if label is None else (out, (out - label).square().mean())


def own(module: Any, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = module(batch.inputs[0], batch.label)[1]
    return found


def constant(module: Any, batch: Batch) -> torch.Tensor:
    return batch.inputs[0].mean(1)


def test_a_training_step_computes_losses_and_metrics_in_the_last_stage() -> None:
    parts = [part.batches() for part in TABLE.parts(4)]
    recipe = {"module": Encoding, "loss": None, "training_step": scaled}
    sizes = {"pipeline": 2, "tensor": 2, "micro_batches": 2}
    mine, metas = train_on(parts, pipeline_job(sizes, recipe=recipe, **FEW_STEPS))
    other, expected = train_on([TABLE.batches()], job_for(recipe=recipe, **FEW_STEPS))
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    for name in ("loss", "train_error", "val_loss", "val_error"):
        assert metas[0]["history"][-1][name] == pytest.approx(expected[0]["history"][-1][name], rel=1e-5)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (noisy, r"(?s)with other values for some rows.*draw random numbers in preprocess"),
        (twice, "calls the module more than once"),
        (penalised, "uses parameters or parts of the module"),
        (layers_penalised, "computes another loss where a pipeline stands for its module"),
        (encoded, "fails where a pipeline stands for its module: AttributeError: .* has no attribute '(first|second)'"),
        (constant, "does not call the module"),
        (paired, r"(?s)with a tensor of shape \(4, 5\) for 2 rows.*views side by side"),
        (own, r"(?s)returns a tensor of shape \(\) for 2 rows.*without labels"),
    ],
)
def test_a_training_step_that_needs_more_than_one_output_of_each_row_is_refused_before_the_job(
    step: Any, says: str
) -> None:
    job = pipeline_job({"pipeline": 2}, recipe={"module": Losing, "loss": None, "training_step": step})
    inputs, label, check = {"x": torch.ones(2, 5)}, torch.ones(2), partial(check_module, job.config, job.recipe, 2)
    for values in (True, False):
        if values or step not in (noisy, layers_penalised):
            with pytest.raises(ModuleError, match=says):
                dry_run(job.recipe, "regression", 0, inputs, label, check=check, values=values)


def centred(module: nn.Module, batch: Batch) -> torch.Tensor:
    assert batch.label is not None
    inputs = batch.inputs[0]
    found: torch.Tensor = (module(inputs - inputs.mean(0)) - batch.label.float()) ** 2
    return found


@LANDING
def test_a_training_step_that_mixes_rows_is_refused_in_its_first_step() -> None:
    recipe = {"module": Paired, "loss": None, "training_step": centred}
    with pytest.raises(ModuleError, match="with other values for some rows than for all of them"):
        train_on([part.batches() for part in TABLE.parts(2)], pipeline_job({"pipeline": 2}, recipe=recipe))


@LANDING
@pytest.mark.parametrize(("config", "precision"), [(llama, "fp32"), (llama, "bf16"), (mixtral, "fp32")])
def test_a_model_of_transformers_is_cut_between_its_layers(config: Any, precision: str) -> None:
    table = texts.sentences(causal, labelled=False)
    params = {"pipeline": 2, "micro_batches": 3}
    few: dict[str, Any] = {"precision": precision, "epochs": 1}
    job = texts.job_for(table, config(), strategy="mesh", strategy_params=params, micro_batch_size=7, **few)
    found, _ = train_on([part.batches() for part in table.parts(2)], job)
    expected, _ = train_on([table.batches()], texts.job_for(table, config(), **few))
    torch.testing.assert_close(found, expected, atol=1e-5 if precision == "fp32" else 3e-2, rtol=0)


class Pooled(Paired):
    """The mean over the elements of a row, of which there may be none."""

    def __init__(self) -> None:
        super().__init__(inputs=1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out = torch.tanh(self.norm(self.first(x.unsqueeze(-1)))) * mask.unsqueeze(-1)
        return self.ended(out, mask)

    def ended(self, out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(out.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)).squeeze(-1)
        return result

    def stages(self) -> list[nn.Module]:
        def enter(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.tanh(self.norm(self.first(x.unsqueeze(-1)))) * mask.unsqueeze(-1), mask

        return [Unit(enter, self.first, self.norm), Unit(self.ended, self.second)]


def shortened(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Leaves each row some of its features."""
    rows = [[row[: int(abs(row[0]) * 10) % 6] for row in batch.column("x0").to_pylist()] for batch in batches]
    return [
        replaced(batch, "x0", pa.array(each, pa.list_(pa.float32()))) for batch, each in zip(batches, rows, strict=True)
    ]


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(2, {"tensor": 2}), pytest.param(4, {"pipeline": 2, "data": 2, "micro_batches": 2}, marks=LANDING)],
)
def test_rows_are_padded_to_the_longest_of_the_ranks_that_compute_on_them(ranks: int, sizes: dict[str, Any]) -> None:
    spec = TensorSpec(name="x0", column="features", dtype="float32", layout="padded", pad=-3)
    columns = replace(TABLE.columns, inputs=(spec,))
    recipe = {"module": Pooled}
    jobs = pipeline_job(sizes, recipe=recipe, **FEW_STEPS), job_for(recipe=recipe, **FEW_STEPS)
    mine, metas = train_on([shortened(p.batches()) for p in TABLE.parts(ranks)], replace(jobs[0], columns=columns))
    other, expected = train_on([shortened(TABLE.batches())], replace(jobs[1], columns=columns))
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    records = [found[0]["history"][-1] for found in (metas, expected)]
    assert records[0]["val_loss"] == pytest.approx(records[1]["val_loss"], abs=1e-5)
