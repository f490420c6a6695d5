"""One suite for all strategies: what each must do on any number of ranks, and what each does in its own way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparktorch import Callback
from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.state_dict import pack_state
from sparktorch.data.columns import LABEL, VALIDATION, WEIGHT
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.errors import ConfigError, ModuleError, UnusedParameterError
from sparktorch.train.callbacks import FitContext
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.fsdp import ShardingOptions, units
from sparktorch.train.strategies.registry import check_module, check_strategy
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Branched, Parted, Rotated, Routed, Score, Tower, Unit
from tests.support.ranks import train_job, train_on
from tests.support.reference import Part, global_batches, validation_rows

ROWS, BATCH, EPOCHS, SEED = 403, 32, 2, 5
TABLE = Table.random(ROWS, weighted=True, validated=True)
STEPS = EPOCHS * math.ceil(int((~TABLE.arrays[VALIDATION]).sum()) / BATCH)
PARTED = {"min_parameters": 60}  # every layer of the tower by itself
# Rows that are held out, with the other sign: the more a module learns of the others, the larger is its loss of them.
_SIGN = np.where(TABLE.arrays[VALIDATION], -1.0, 1.0)
CONTRARY = replace(TABLE, arrays={**TABLE.arrays, LABEL: TABLE.arrays[LABEL] * _SIGN})
# For what a few steps show as well: five, of whole batches.
FEW_STEPS: dict[str, Any] = {"batch_size": 64, "epochs": 1, "accumulation_steps": 1}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp, a bucket for each gradient": {"strategy": "ddp", "strategy_params": {"bucket_cap_mb": 0}},
    "ddp, static graph": {"strategy": "ddp", "strategy_params": {"static_graph": True}, "accumulation_steps": 1},
    "ddp, searching": {"strategy": "ddp", "strategy_params": {"find_unused_parameters": True}},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2", "strategy_params": PARTED},
    "zero3": {"strategy": "zero3", "strategy_params": PARTED},
    "zero3, by class": {"strategy": "zero3", "strategy_params": {"wrap_classes": ["Sequential"]}},
    "parameterServer, in step": {"strategy": "parameterServer", "strategy_params": {"staleness": 0}},
    "parameterServer, spread": {"strategy": "parameterServer", "strategy_params": {"staleness": 0, "servers": None}},
    "zero3, activations computed twice": {
        "strategy": "zero3",
        "strategy_params": {**PARTED, "activation_checkpointing": True},
    },
}


def job_for(table: Table = TABLE, *, recipe: dict[str, Any] | None = None, **config: Any) -> TrainJob:
    values: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, "accumulation_steps": 2, **config}
    made: dict[str, Any] = {"module": Tower, "learning_rate": 3e-3, "optimizer_params": {"weight_decay": 0.05}}
    return train_job(table, Recipe(**{**made, **(recipe or {})}), TrainConfig(task="regression", **values))


def plain(
    table: Table = TABLE,
    *,
    of: Callable[[], nn.Module] = Tower,
    batch_size: int = BATCH,
    epochs: int = EPOCHS,
    **optimizer: Any,
) -> tuple[dict[str, torch.Tensor], float]:
    torch.manual_seed(SEED)
    module = of()
    kind = optimizer.pop("kind", torch.optim.AdamW)
    made = kind(module.parameters(), **(optimizer or {"lr": 3e-3, "weight_decay": 0.05}))

    def loss_of(part: Part) -> torch.Tensor:
        return ((module(part.x) - part.y) ** 2 * part.w).sum().div(part.w.sum())

    for _, part in global_batches(table, TrainConfig(batch_size=batch_size, epochs=epochs, seed=SEED)):
        made.zero_grad()
        loss_of(part).backward()  # type: ignore[no-untyped-call]
        made.step()
    with torch.no_grad():
        return module.state_dict(), float(loss_of(validation_rows(table)))


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, torch.Tensor], float]:
    return plain()


class Weights(Callback):
    """Leaves the bytes of the whole model, as each rank has it in the end."""

    ranks = "all"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_fit_end(self, context: FitContext) -> None:
        state: dict[str, Any] = context.module.state_dict()
        whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
        (self._folder / str(context.world.rank)).write_bytes(pack_state(whole))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_trains_what_one_plain_loop_trains_and_all_end_with_the_same_bits(
    case: str, ranks: int, expected: tuple[dict[str, torch.Tensor], float], tmp_path: Path
) -> None:
    job = job_for(recipe={"callbacks": [Weights(tmp_path)]}, **CASES[case])
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], job)
    torch.testing.assert_close(state, expected[0], atol=1e-5, rtol=0)
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(expected[1], abs=1e-5)
    states = [path.read_bytes() for path in tmp_path.iterdir()]
    assert len(states) == ranks
    assert len(set(states)) == 1


@pytest.mark.parametrize("case", ["ddp", "zero1", "zero2", "zero3", "parameterServer, spread"])
def test_ranks_without_rows_take_part_and_change_nothing(
    case: str, expected: tuple[dict[str, torch.Tensor], float]
) -> None:
    # One rank has all the validation rows, one nothing at all.
    held_out = TABLE.arrays[VALIDATION]
    parts = [TABLE.take(~held_out).batches(), [], TABLE.take(held_out).batches()]
    job = replace(job_for(**CASES[case]), placeholder=TABLE.batches()[0].slice(7, 1))
    state, metas = train_on(parts, job)
    torch.testing.assert_close(state, expected[0], atol=1e-5, rtol=0)
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(expected[1], abs=1e-5)


# A row that uses the layer that few rows use.
_SHOWN = int(np.flatnonzero(TABLE.arrays["x0"][:, 0] > 0.9)[0])


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_layer_that_no_row_of_a_rank_uses_trains_as_in_one_process(strategy: str, parts: int) -> None:
    job = job_for(recipe={"module": Branched}, strategy=strategy, epochs=1, accumulation_steps=parts)
    state, _ = train_on([part.batches() for part in TABLE.parts(3)], job, seconds=60)
    torch.testing.assert_close(state, plain(of=Branched, epochs=1)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "config",
    [
        {"strategy": "ddp"},
        {"strategy": "zero1"},
        {"strategy": "ddp", "micro_batch_size": "auto"},
        {"strategy": "parameterServer", "strategy_params": {"staleness": 0}},
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_a_layer_that_no_row_of_a_step_uses_stays_as_it_is_whatever_placeholder_rows_use(
    config: dict[str, Any],
) -> None:
    few: dict[str, Any] = {"batch_size": 2, "epochs": 1, "accumulation_steps": 1, "unused_parameters": True}
    job = job_for(recipe={"module": Branched}, **few, **config)
    job = replace(job, placeholder=TABLE.batches()[0].slice(_SHOWN, 1))
    state, _ = train_on([part.batches() for part in TABLE.parts(3)], job, seconds=60)
    torch.testing.assert_close(state, plain(of=Branched, epochs=1, batch_size=2)[0], atol=1e-5, rtol=0)


def test_ranks_that_do_not_search_say_so_where_no_row_of_a_step_uses_a_layer() -> None:
    job = job_for(recipe={"module": Branched}, batch_size=2, accumulation_steps=1)
    with pytest.raises(UnusedParameterError, match=r"parameter 'extra\.weight' got no gradient in a step"):
        train_on([part.batches() for part in TABLE.parts(3)], job, seconds=60)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_layer_that_some_steps_or_ranks_use_is_named_where_parameters_are_sharded(strategy: str) -> None:
    job = job_for(recipe={"module": Branched}, strategy=strategy, accumulation_steps=1)
    with pytest.raises(ModuleError, match="parameters of 'extra' got gradients in some steps or ranks only"):
        train_on([part.batches() for part in TABLE.parts(3)], job, seconds=60)


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("after", [0, 4], ids=["in the first step", "in a later step"])
def test_experts_of_one_size_that_ranks_call_apart_are_named_where_parameters_are_sharded(
    after: int, kinds: int
) -> None:
    params = {"strategy": "zero3", "strategy_params": {"min_parameters": 6}}
    rows: dict[str, Any] = {"accumulation_steps": kinds, "batch_size": 2 * kinds}
    job = job_for(recipe={"module": partial(Routed, after, mixes=kinds > 1)}, **rows, **params)
    with pytest.raises(ModuleError, match=r"calls? 'experts\.\d' where (another rank|the first step) does"):
        train_on([part.batches() for part in TABLE.parts(2)], job, seconds=60)


@pytest.mark.parametrize("searches", [False, True])
def test_a_table_with_sparse_gradients_that_few_rows_use_trains_as_in_one_process(searches: bool) -> None:
    optimizer: dict[str, Any] = {"optimizer": "SGD", "learning_rate": 0.05, "optimizer_params": {}}
    recipe = {"module": Branched, "module_params": {"sparse": True}, **optimizer}
    small: dict[str, Any] = {"batch_size": 2 if searches else BATCH, "epochs": 1, "accumulation_steps": 1}
    state, _ = train_on(
        [part.batches() for part in TABLE.parts(3)], job_for(recipe=recipe, unused_parameters=searches, **small)
    )
    wanted, _ = plain(
        of=partial(Branched, sparse=True), kind=torch.optim.SGD, lr=0.05, epochs=1, batch_size=small["batch_size"]
    )
    torch.testing.assert_close(state, wanted, atol=1e-5, rtol=0)


class NormalisedScore(Score):
    """Normalises its inputs over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


@pytest.mark.parametrize("ranks", [1, 2])
def test_statistics_of_batch_normalisation_are_those_of_real_rows(ranks: int) -> None:
    table = Table.random(257, seed=1)
    config: dict[str, Any] = {"batch_size": 256, "epochs": 1, "accumulation_steps": 1}
    job = job_for(table, recipe={"module": NormalisedScore}, **config)
    state, _ = train_on([part.batches() for part in table.parts(ranks)], job)
    counted = int(state["norm.num_batches_tracked"])
    assert counted == 1  # not the step of one row
    torch.manual_seed(SEED)
    module = NormalisedScore()
    with torch.no_grad():
        module(torch.from_numpy(table.arrays["x0"][:256]))
    torch.testing.assert_close(state["norm.running_var"], module.norm.running_var, atol=0.03, rtol=0)


@pytest.mark.parametrize(("strategy", "ranks"), [("zero2", 1), ("zero3", 2)])
def test_a_rank_without_a_gpu_has_nothing_to_offload(strategy: str, ranks: int) -> None:
    job = job_for(strategy=strategy, strategy_params={"cpu_offload": True})
    with pytest.raises(ConfigError, match="cpu_offload is set, and not every worker has a GPU to offload"):
        train_on([part.batches() for part in TABLE.parts(ranks)], job, device="cpu")


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powerSGD"])
def test_compressed_gradients_train_nearly_the_same(hook: str, expected: tuple[dict[str, torch.Tensor], float]) -> None:
    params = {"comm_hook": hook, "powersgd_start_step": 4}
    state, metas = train_on([part.batches() for part in TABLE.parts(3)], job_for(strategy_params=params))
    difference = max(float((state[name] - value).abs().max()) for name, value in expected[0].items())
    assert 1e-6 < difference < 0.05
    history = metas[0]["history"]
    assert history[-1]["loss"] < history[0]["loss"]


def test_power_sgd_sends_models_of_several_buckets_as_one_on_cpus() -> None:
    params = {"comm_hook": "powerSGD", "powersgd_start_step": 2}
    job = job_for(strategy_params=params)
    wide = replace(job.recipe, module=Score, module_params={"hidden": 200_000})  # 5 MB
    parts = [part.batches() for part in TABLE.parts(2)]
    _, metas = train_on(parts, replace(job, recipe=wide), device="cpu")
    assert math.isfinite(metas[0]["history"][-1]["loss"])
    with pytest.raises(ConfigError, match="bucket_cap_mb does not go together with comm_hook='powerSGD' on CPUs"):
        train_on(parts, job_for(strategy_params={**params, "bucket_cap_mb": 1}), device="cpu")


@pytest.mark.parametrize(("strategy", "ranks"), [("zero2", 1), ("zero3", 2)])
def test_parameters_in_half_the_width_train_nearly_the_same(
    strategy: str, ranks: int, expected: tuple[dict[str, torch.Tensor], float]
) -> None:
    params = {**PARTED, "param_dtype": "bf16", "reduce_dtype": "fp32"}
    job = job_for(strategy=strategy, strategy_params=params)
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], job)
    assert all(value.dtype == torch.float32 for value in state.values())
    difference = max(float((state[name] - value).abs().max()) for name, value in expected[0].items())
    assert 1e-6 < difference < 0.05
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(expected[1], rel=0.2)


SGD: dict[str, Any] = {"optimizer": "SGD", "learning_rate": 0.05, "optimizer_params": {}}


@pytest.mark.parametrize("params", [{"period": 1}, {"period": 100, "start_step": 10_000}])
@pytest.mark.parametrize("ranks", [1, 3])
def test_local_sgd_that_averages_after_every_step_is_synchronous(params: dict[str, int], ranks: int) -> None:
    job = job_for(recipe=SGD, strategy="localSGD", strategy_params=params)
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], job)
    wanted, loss = plain(kind=torch.optim.SGD, lr=0.05)
    torch.testing.assert_close(state, wanted, atol=1e-5, rtol=0)
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(loss, abs=1e-5)


def by_hand(ranks: int, period: int, start: int) -> dict[str, torch.Tensor]:
    held_out = TABLE.arrays[VALIDATION]
    parts = [part.take(~part.arrays[VALIDATION]).by_key() for part in TABLE.parts(ranks)]
    plan = SamplingPlan(rows=int((~held_out).sum()), batch_size=BATCH, seed=SEED, shuffle=True)
    torch.manual_seed(SEED)
    modules = [Tower() for _ in range(ranks)]
    for module in modules:
        module.load_state_dict(modules[0].state_dict())
    done = 0
    for epoch in range(EPOCHS):
        edges = np.cumsum([0, *map(len, parts)])
        steps = [plan.steps_of(a, b, epoch) for a, b in itertools.pairwise(edges)]
        for step in range(plan.steps):
            batches = [part.take(own == step) for part, own in zip(parts, steps, strict=True)]
            total = sum(float(batch.arrays[WEIGHT].sum()) for batch in batches)
            for module, batch in zip(modules, batches, strict=True):
                x, y, w = (torch.from_numpy(batch.arrays[name]) for name in ("x0", "y", WEIGHT))
                module.zero_grad()
                (((module(x) - y.float()) ** 2 * w).sum() * ranks / total).backward()
            if done < start:
                _mean([[p.grad for p in module.parameters() if p.grad is not None] for module in modules])
            for module in modules:
                with torch.no_grad():
                    for p in module.parameters():
                        if p.grad is not None:
                            p -= 0.05 * p.grad
            done += 1
            if done > start and (done - start) % period == 0:
                _mean([list(module.parameters()) for module in modules])
    _mean([list(module.parameters()) for module in modules])
    return modules[0].state_dict()


@torch.no_grad()
def _mean(groups: list[list[torch.Tensor]]) -> None:
    for same in zip(*groups, strict=True):
        mean = torch.stack(same).mean(0)
        for tensor in same:
            tensor.copy_(mean)


@pytest.mark.parametrize(("period", "start"), [(5, 0), (3, 4)])
def test_local_sgd_averages_models_that_went_apart(period: int, start: int) -> None:
    params = {"period": period, "start_step": start}
    job = job_for(recipe=SGD, strategy="localSGD", strategy_params=params)
    state, _ = train_on([part.batches() for part in TABLE.parts(3)], job)
    wanted = by_hand(3, period, start)
    torch.testing.assert_close(state, wanted, atol=1e-5, rtol=0)
    assert not torch.allclose(wanted["last.weight"], plain(kind=torch.optim.SGD, lr=0.05)[0]["last.weight"], atol=1e-4)


@pytest.mark.parametrize(
    ("module", "params"), [(Parted, {"period": 100, "start_step": 10_000}), (Rotated, {"period": 1})]
)
def test_local_sgd_averages_what_some_ranks_reach_and_what_is_complex(module: type, params: dict[str, int]) -> None:
    def trained(**config: Any) -> dict[str, torch.Tensor]:
        job = job_for(recipe={**SGD, "module": module}, accumulation_steps=1, **config)
        return train_on([part.batches() for part in TABLE.parts(3)], job, seconds=40)[0]

    wanted = trained(unused_parameters=True)
    torch.testing.assert_close(trained(strategy="localSGD", strategy_params=params), wanted, atol=1e-5, rtol=0)


def test_looking_at_the_model_does_not_change_local_training() -> None:
    def trained(**config: Any) -> dict[str, torch.Tensor]:
        job = job_for(recipe=SGD, strategy="localSGD", strategy_params={"period": 5}, **config)
        return train_on([part.batches() for part in TABLE.parts(2)], job)[0]

    often, seldom = trained(), trained(validation_interval=100)
    assert all(torch.equal(often[name], seldom[name]) for name in often)


def test_parts_are_gathered_by_themselves_if_they_are_large_or_of_a_class() -> None:
    tower = Tower()
    assert units(tower, ShardingOptions(min_parameters=91)) == []  # smaller ones go with the whole
    assert units(tower, ShardingOptions(min_parameters=90)) == [
        tower.blocks[0][0],  # type: ignore[index]
        tower.blocks[1][0],  # type: ignore[index]
    ]
    assert tower.last in units(tower, ShardingOptions(min_parameters=1))
    assert tower.tied not in units(tower, ShardingOptions(min_parameters=1))
    by_class = units(tower, ShardingOptions(wrap_classes=["Sequential"]))
    assert by_class == [tower.first, *tower.blocks]
    with pytest.raises(ModuleError, match="no part of class 'Sequental'"):
        units(tower, ShardingOptions(wrap_classes=["Sequental"]))


@pytest.mark.parametrize(
    ("strategy", "params", "message"),
    [
        ("ddp", {"bucket_mb": 1}, "unknown key strategyParams.bucket_mb"),
        ("ddp", {"static_graph": True}, "strategyParams.static_graph does not go together with micro-batches"),
        ("ddp", {"comm_hook": "int8"}, "strategyParams.comm_hook 'int8' is unknown"),
        ("zero3", {"pipeline": 2, "min_parameters": 5}, "strategyParams.pipeline is no option of strategy 'zero3'"),
        ("localSGD", {"period": 0}, "strategyParams.period must be at least 1, got 0"),
    ],
)
def test_options_that_a_strategy_does_not_have_are_refused(strategy: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_strategy(
            TrainConfig(strategy=strategy, strategy_params=params, accumulation_steps=2), Recipe(module=Tower)
        )
    assert caught.value.what == message


@pytest.mark.parametrize("optimizer", ["Rprop", torch.optim.Adafactor, "Muon"])
def test_optimizers_of_whole_parameters_are_refused_where_these_are_divided(optimizer: Any) -> None:
    batch = Batch((torch.ones(2, 5),), torch.ones(2), None, 2)
    for strategy, params in (("zero2", {}), ("mesh", {"shard": 2}), ("mesh", {"tensor": 2})):
        job = job_for(
            recipe={"optimizer": optimizer, "optimizer_params": {}}, strategy=strategy, strategy_params=params
        )
        with pytest.raises(ConfigError, match="computes with whole parameters"):
            check_module(job.config, job.recipe, 2, Tower(), batch)


class Tempered(Tower):
    """Has a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.temperature

    def stages(self) -> list[nn.Module]:
        return [*super().stages(), Unit(lambda x, by: x * by, by=self.temperature)]


class Renormed(Tower):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, **options)


class Mixed(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("last", nn.Linear(5, 5, dtype=torch.float64))


class Versioned(Tower):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def strided() -> nn.Module:
    return nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("module", "strategy", "params", "says"),
    [
        (Tempered, "zero2", {}, "'temperature' is a scalar"),
        (Tempered, "mesh", {"data": 2}, "'temperature' is a scalar"),
        (Tempered, "mesh", {"pipeline": 2}, ""),
        (partial(Renormed, max_norm=1.0), "zero3", {}, "'?table'? has max_norm"),
        (partial(Renormed, sparse=True), "zero3", {}, "'?table'? has sparse gradients"),
        (strided, "zero3", {}, "'weight' is not contiguous"),
        (Mixed, "zero3", {}, "of torch.float32 and 'last.bias' of torch.float64, in one Mixed"),
        (partial(nn.LazyLinear, 1), "ddp", {}, "'weight' gets its shape in the first forward pass"),
        (partial(nn.LazyLinear, 1), "zero3", {}, "'weight' gets its shape in the first forward pass"),
        (Versioned, "ddp", {}, "'_extra_state', which is no tensor but of type dict"),
    ],
)
def test_parameters_that_several_ranks_cannot_have_are_refused_before_the_job(
    module: Any, strategy: str, params: dict[str, Any], says: str
) -> None:
    job, batch = job_for(strategy=strategy, strategy_params=params), Batch((torch.ones(2, 5),), torch.ones(2), None, 2)
    with pytest.raises(ModuleError, match=says) if says else nullcontext():
        check_module(job.config, job.recipe, 2, module(), batch)


def test_one_rank_divides_parameters_only_to_change_their_dtypes() -> None:
    job, batch = job_for(strategy="zero3"), Batch((torch.ones(2, 5),), torch.ones(2), None, 2)
    for module in (Tempered(), Renormed(max_norm=1.0), Renormed(sparse=True), strided(), Mixed()):
        check_module(job.config, job.recipe, 1, module, batch)
    job = job_for(strategy="zero3", strategy_params={"reduce_dtype": "bf16"})
    with pytest.raises(ModuleError, match="'temperature' is a scalar"):
        check_module(job.config, job.recipe, 1, Tempered(), batch)


def with_penalty(module: nn.Module, batch: Any) -> torch.Tensor:
    rows: torch.Tensor = module(*batch.inputs) + sum(p.square().sum() for p in module.parameters())
    return rows


def test_a_step_that_computes_with_parts_of_parameters_is_told_so() -> None:
    job = job_for(recipe={"training_step": with_penalty}, strategy="zero3", strategy_params=PARTED)
    with pytest.raises(ModuleError, match=r"(?s)computes with parameters .* outside of its forward pass.*weight_decay"):
        train_on([part.batches() for part in TABLE.parts(2)], job)


class InPlace(nn.Module):
    """Changes in place what its parts return: views, as of a linear layer over three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 8), nn.Linear(4, 4), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.tanh(self.first(x)).view(-1, 2, 4)
        out = self.second(rows)
        out += rows
        last: torch.Tensor = self.last(F.relu(out, inplace=True).flatten(1))
        return last.squeeze(1)


@pytest.mark.parametrize(
    ("strategy", "params"),
    [
        ("zero3", {"min_parameters": 9}),
        ("mesh", {"tensor": 2, "plan": {"second": "colwise_gather_output"}}),
    ],
)
def test_what_parts_return_may_be_changed_in_place(strategy: str, params: dict[str, Any]) -> None:
    job = job_for(recipe={"module": InPlace}, strategy=strategy, strategy_params=params)
    state, _ = train_on([part.batches() for part in TABLE.parts(2)], job)
    torch.testing.assert_close(state, plain(of=InPlace)[0], atol=1e-5, rtol=0)
