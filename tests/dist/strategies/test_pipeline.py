"""A module whose layers are on ranks one after another trains as one process does, wherever it is cut."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparktorch import Callback
from sparktorch.base.batch import Batch
from sparktorch.data.columns import TensorSpec
from sparktorch.errors import ModuleError
from sparktorch.train.recipe.dry_run import dry_run
from sparktorch.train.strategies.registry import check_module
from tests.dist.train import test_huggingface as texts
from tests.support.attention_nets import Encoder
from tests.support.frames import replaced
from tests.support.nets import Chain, Paired, Unit
from tests.support.ranks import train_on
from tests.support.staged_nets import normed
from tests.support.strategies import FEW_STEPS, SGD, TABLE, alike, job_for, trained
from tests.support.tiny_transformers import causal, llama, mixtral

LANDING = pytest.mark.landing


@LANDING
@pytest.mark.parametrize(
    ("module", "split", "options"),
    [
        (normed, ["2"], {}),
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
    recipe = {**SGD, "module": module, "optimizer_params": {"weight_decay": 0.1}}
    sizes = {"pipeline": ranks, "split": split, "micro_batches": max(3, ranks), **options}
    mine = trained(job_for(recipe=recipe, sizes=sizes, **FEW_STEPS), ranks)
    alike(mine, trained(job_for(recipe=recipe, **FEW_STEPS)), "val_loss")


class Frozen(Chain):
    """Keeps its layers in evaluation, and computes with a number that a callback changes."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5, unused=40)  # the parts of `layers` are small beside it, and called as they are
        self.factor = 1.0

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.layers.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(x))

    def scaled(self, out: torch.Tensor) -> torch.Tensor:
        return out * self.factor

    def stages(self) -> list[nn.Module]:
        return [*super().stages(), Unit(self.scaled)]


class Growing(Callback):
    ranks = "all"

    def on_epoch_end(self, context: Any, record: Any) -> None:
        context.module.factor += 0.5


@LANDING
def test_modes_and_numbers_that_a_module_and_callbacks_set_count() -> None:
    recipe = {**SGD, "module": Frozen, "callbacks": [Growing()]}
    few = {**FEW_STEPS, "epochs": 2}  # the second with what was set after the first
    mine = trained(job_for(recipe=recipe, sizes={"pipeline": 2, "micro_batches": 2}, **few), 2)
    alike(mine, trained(job_for(recipe=recipe, **few)))


class Dropping(nn.Linear):
    """Drops half of its input, and has parameters to train."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training) + 0 * super().forward(x)


def twofold() -> nn.Module:
    return nn.Sequential(Dropping(5, 5), Dropping(5, 5))


def outputs(module: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    found = module(torch.ones_like(batch.inputs[0])).mean(1)
    return found, {"output": found.detach()}


@LANDING
def test_stages_drop_other_activations() -> None:
    recipe = {"module": twofold, "loss": None, "training_step": outputs}
    _, metas = trained(job_for(recipe=recipe, sizes={"pipeline": 2, "micro_batches": 2}, **FEW_STEPS), 2)
    assert metas[0]["history"][-1]["train_output"] == pytest.approx(1, abs=0.3)  # 2 if both drop the same


@LANDING
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Chain, {"stages_per_rank": 2}),
        (Encoder, {"schedule": "gpipe"}),  # of which torch has fused kernels, for evaluation
    ],
)
def test_with_bfloat16_stages_pass_on_what_one_process_computes(module: Any, options: dict[str, Any]) -> None:
    recipe = {**SGD, "module": module, "learning_rate": 3e-3}
    config = {**FEW_STEPS, "batch_size": 32, "precision": "bf16"}
    mine = trained(job_for(recipe=recipe, sizes={"pipeline": 2, "micro_batches": 4, **options}, **config), 2)
    alike(mine, trained(job_for(recipe=recipe, **config)), "val_loss", atol=2e-4, rel=1e-3)


def errors(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    assert batch.label is not None
    return output - batch.label.float()


def penalised(module: nn.Module, batch: Batch) -> torch.Tensor:
    return errors(module(batch.inputs[0]), batch) ** 2 + sum(p.square().sum() for p in module.parameters())


def layers_penalised(module: Any, batch: Batch) -> torch.Tensor:
    norms = [part for part in module.children() if isinstance(part, nn.LayerNorm)]
    return errors(module(batch.inputs[0]), batch) ** 2 + sum(part.weight.square().sum() for part in norms)


def twice(module: nn.Module, batch: Batch) -> torch.Tensor:
    return errors(module(batch.inputs[0]) + module(-batch.inputs[0]), batch)


def noisy(module: nn.Module, batch: Batch) -> torch.Tensor:
    return errors(module(batch.inputs[0] + torch.randn_like(batch.inputs[0])), batch) ** 2


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
    return errors(module.encode(batch.inputs[0]), batch) ** 2


def paired(module: Any, batch: Batch) -> torch.Tensor:
    one, other = module(torch.cat([batch.inputs[0], -batch.inputs[0]])).chunk(2)
    return errors(one, batch) ** 2 + (one - other) ** 2


def test_a_training_step_computes_losses_and_metrics_in_the_last_stage() -> None:
    recipe = {"module": Encoding, "loss": None, "training_step": scaled}
    sizes = {"pipeline": 2, "tensor": 2, "micro_batches": 2}
    mine = trained(job_for(recipe=recipe, sizes=sizes, **FEW_STEPS), 4)
    alike(mine, trained(job_for(recipe=recipe, **FEW_STEPS)), "loss", "train_error", "val_loss", "val_error", rel=1e-5)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (noisy, r"(?s)with other values for some rows.*draw random numbers in preprocess"),
        (twice, "calls the module more than once"),
        (lambda module, batch: batch.inputs[0].mean(1), "does not call the module"),
        (penalised, "uses parameters or parts of the module"),
        (layers_penalised, "computes another loss where a pipeline stands for its module"),
        (encoded, "fails where a pipeline stands for its module: AttributeError: .* has no attribute '(first|second)'"),
        (paired, r"(?s)with a tensor of shape \(4, 5\) for 2 rows.*views side by side"),
    ],
)
def test_a_training_step_that_needs_more_than_one_output_of_each_row_is_refused_before_the_job(
    step: Any, says: str
) -> None:
    job = job_for(recipe={"module": Encoding, "loss": None, "training_step": step}, sizes={"pipeline": 2})
    inputs, label, check = {"x": torch.ones(2, 5)}, torch.ones(2), partial(check_module, job.config, job.recipe, 2)
    for values in (True, False):
        if values or step not in (noisy, layers_penalised):
            with pytest.raises(ModuleError, match=says):
                dry_run(job.recipe, "regression", 0, inputs, label, check=check, values=values)


def centred(module: nn.Module, batch: Batch) -> torch.Tensor:
    return errors(module(batch.inputs[0] - batch.inputs[0].mean(0)), batch) ** 2


@LANDING
def test_a_training_step_that_mixes_rows_is_refused_in_its_first_step() -> None:
    recipe = {"module": Paired, "loss": None, "training_step": centred}
    with pytest.raises(ModuleError, match="with other values for some rows than for all of them"):
        trained(job_for(recipe=recipe, sizes={"pipeline": 2}), 2)


@LANDING
@pytest.mark.parametrize("config", [llama, mixtral])
def test_a_model_of_transformers_is_cut_between_its_layers(config: Any) -> None:
    table = texts.sentences(causal, labelled=False)
    params = {"pipeline": 2, "micro_batches": 3}
    job = texts.job_for(table, config(), strategy="mesh", strategy_params=params, micro_batch_size=7, epochs=1)
    alike(trained(job, 2, table=table), trained(texts.job_for(table, config(), epochs=1), table=table))


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
    found = []
    for batch in batches:
        rows = [row[: int(abs(row[0]) * 10) % 6] for row in batch.column("x0").to_pylist()]
        found.append(replaced(batch, "x0", pa.array(rows, pa.list_(pa.float32()))))
    return found


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(2, {"tensor": 2}), pytest.param(4, {"pipeline": 2, "data": 2, "micro_batches": 2}, marks=LANDING)],
)
def test_rows_are_padded_to_the_longest_of_the_ranks_that_compute_on_them(ranks: int, sizes: dict[str, Any]) -> None:
    spec = TensorSpec(name="x0", column="features", dtype="float32", layout="padded", pad=-3)
    columns = replace(TABLE.columns, inputs=(spec,))
    found = []
    for count, options in ((ranks, sizes), (1, None)):
        job = replace(job_for(recipe={"module": Pooled}, sizes=options, **FEW_STEPS), columns=columns)
        found.append(train_on([shortened(part.batches()) for part in TABLE.parts(count)], job))
    alike(*found, "val_loss")
