"""One suite for all strategies: what each must do on any number of ranks, and what each does in its own way."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparktorch.data.columns import VALIDATION, WEIGHT
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.errors import ConfigError, ModuleError, SparkTorchError, UnusedParameterError
from sparktorch.train.strategies.registry import check_device
from tests.support.frames import Table
from tests.support.nets import Branched, Parted, Rotated, Routed, Score, Tower
from tests.support.ranks import train_on
from tests.support.strategies import (
    BATCH,
    EPOCHS,
    PARTED,
    SEED,
    SGD,
    TABLE,
    Weights,
    close,
    job_for,
    lone_rows,
    plain,
    trained,
)

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


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, torch.Tensor], float]:
    return plain()


# Of those that wrap no module for one rank, one is enough.
ALONE = ("ddp", "zero1", "zero3", "parameterServer, in step", "zero3, activations computed twice")


@pytest.mark.parametrize(("case", "ranks"), [*((case, 3) for case in CASES), *((case, 1) for case in ALONE)])
def test_any_number_of_ranks_trains_what_one_plain_loop_trains_and_all_end_with_the_same_bits(
    case: str, ranks: int, expected: tuple[dict[str, torch.Tensor], float], tmp_path: Path
) -> None:
    close(trained(job_for(recipe={"callbacks": [Weights(tmp_path)]}, **CASES[case]), ranks), expected)
    states = [path.read_bytes() for path in tmp_path.iterdir()]
    assert len(states) == ranks
    assert len(set(states)) == 1


@pytest.mark.parametrize("case", ["ddp", "zero1", "zero2", "zero3", "parameterServer, spread"])
def test_ranks_without_rows_take_part_and_change_nothing(
    case: str, expected: tuple[dict[str, torch.Tensor], float]
) -> None:
    job = replace(job_for(**CASES[case]), placeholder=TABLE.batches()[0].slice(7, 1))
    close(train_on(lone_rows(3), job), expected)


# A row that uses the layer that few rows use.
_SHOWN = int(np.flatnonzero(TABLE.arrays["x0"][:, 0] > 0.9)[0])


@pytest.mark.parametrize(("strategy", "parts"), [("ddp", 3), ("zero1", 1)])
def test_a_layer_that_no_row_of_a_rank_uses_trains_as_in_one_process(strategy: str, parts: int) -> None:
    job = job_for(recipe={"module": Branched}, strategy=strategy, epochs=1, accumulation_steps=parts)
    close(trained(job, 3, seconds=60), plain({"module": Branched}, epochs=1))


@pytest.mark.parametrize(
    "config",
    [
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
    close(trained(job, 3, seconds=60), plain({"module": Branched}, epochs=1, batch_size=2))


def test_ranks_that_do_not_search_say_so_where_no_row_of_a_step_uses_a_layer() -> None:
    job = job_for(recipe={"module": Branched}, batch_size=2, accumulation_steps=1)
    with pytest.raises(UnusedParameterError, match=r"parameter 'extra\.weight' got no gradient in a step"):
        trained(job, 3, seconds=60)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_layer_that_some_steps_or_ranks_use_is_named_where_parameters_are_sharded(strategy: str) -> None:
    job = job_for(recipe={"module": Branched}, strategy=strategy, accumulation_steps=1)
    with pytest.raises(ModuleError, match="parameters of 'extra' got gradients in some steps or ranks only"):
        trained(job, 3, seconds=60)


@pytest.mark.parametrize(("after", "kinds"), [(0, 1), (4, 1), (4, 2)])
def test_experts_of_one_size_that_ranks_call_apart_are_named_where_parameters_are_sharded(
    after: int, kinds: int
) -> None:
    params = {"strategy": "zero3", "strategy_params": {"min_parameters": 6}}
    rows: dict[str, Any] = {"accumulation_steps": kinds, "batch_size": 2 * kinds}
    job = job_for(recipe={"module": partial(Routed, after, mixes=kinds > 1)}, **rows, **params)
    with pytest.raises(ModuleError, match=r"calls? 'experts\.\d' where (another rank|the first step) does"):
        trained(job, 2, seconds=60)


@pytest.mark.parametrize("searches", [False, True])
def test_a_table_with_sparse_gradients_that_few_rows_use_trains_as_in_one_process(searches: bool) -> None:
    recipe = {**SGD, "module": Branched, "module_params": {"sparse": True}}
    small: dict[str, Any] = {"batch_size": 2 if searches else BATCH, "epochs": 1, "accumulation_steps": 1}
    close(trained(job_for(recipe=recipe, unused_parameters=searches, **small), 3), plain(recipe, **small))


def normalised() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(5), Score())


@pytest.mark.parametrize("ranks", [1, 2])
def test_statistics_of_batch_normalisation_are_those_of_real_rows(ranks: int) -> None:
    table = Table.random(257, seed=1)
    config: dict[str, Any] = {"batch_size": 256, "epochs": 1, "accumulation_steps": 1}
    state, _ = trained(job_for(table=table, recipe={"module": normalised}, **config), ranks, table=table)
    assert int(state["0.num_batches_tracked"]) == 1  # not the step of one row
    norm = nn.BatchNorm1d(5)
    norm(torch.from_numpy(table.arrays["x0"][:256]))
    torch.testing.assert_close(state["0.running_var"], norm.running_var, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("strategy", "params", "says"),
    [
        ("zero3", {"cpu_offload": True}, "cpu_offload is set, and not every worker has a GPU to offload"),
        ("ddp", {"comm_hook": "powerSGD", "bucket_cap_mb": 1}, "on CPUs, 'powerSGD' sends all gradients in one bucket"),
    ],
)
def test_what_needs_a_gpu_is_refused_before_the_job_and_in_ranks(
    strategy: str, params: dict[str, Any], says: str
) -> None:
    job = job_for(strategy=strategy, strategy_params=params)
    check_device(job.config, "cuda")
    for refused in (partial(trained, job, 2, device="cpu"), partial(check_device, job.config, "cpu")):
        with pytest.raises(ConfigError, match=says):
            refused()


@pytest.mark.parametrize("hook", ["fp16", "powerSGD"])
def test_compressed_gradients_train_nearly_the_same(hook: str, expected: tuple[dict[str, torch.Tensor], float]) -> None:
    params = {"comm_hook": hook, "powersgd_start_step": 4}
    state, metas = trained(job_for(strategy_params=params), 3)
    difference = max(float((state[name] - value).abs().max()) for name, value in expected[0].items())
    assert 1e-6 < difference < 0.05
    history = metas[0]["history"]
    assert history[-1]["loss"] < history[0]["loss"]


def test_power_sgd_sends_models_of_several_buckets_as_one_on_cpus() -> None:
    params = {"comm_hook": "powerSGD", "powersgd_start_step": 2}
    wide = {"module": Score, "module_params": {"hidden": 200_000}}  # 5 MB
    _, metas = trained(job_for(recipe=wide, strategy_params=params), 2, device="cpu")
    assert math.isfinite(metas[0]["history"][-1]["loss"])


@pytest.mark.parametrize(("strategy", "ranks"), [("zero2", 1), ("zero3", 2)])
def test_parameters_in_half_the_width_train_nearly_the_same(
    strategy: str, ranks: int, expected: tuple[dict[str, torch.Tensor], float]
) -> None:
    params = {**PARTED, "param_dtype": "bf16", "reduce_dtype": "fp32"}
    state, metas = trained(job_for(strategy=strategy, strategy_params=params), ranks)
    assert all(value.dtype == torch.float32 for value in state.values())
    difference = max(float((state[name] - value).abs().max()) for name, value in expected[0].items())
    assert 1e-6 < difference < 0.05
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(expected[1], rel=0.2)


@pytest.mark.parametrize(
    ("params", "ranks"), [({"period": 1}, 1), ({"period": 1}, 3), ({"period": 100, "start_step": 10_000}, 3)]
)
def test_local_sgd_that_averages_after_every_step_is_synchronous(params: dict[str, int], ranks: int) -> None:
    close(trained(job_for(recipe=SGD, strategy="localSGD", strategy_params=params), ranks), plain(SGD))


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
    wanted = by_hand(3, period, start)
    torch.testing.assert_close(trained(job, 3)[0], wanted, atol=1e-5, rtol=0)
    assert not torch.allclose(wanted["last.weight"], plain(SGD)[0]["last.weight"], atol=1e-4)


@pytest.mark.parametrize(
    ("module", "params"), [(Parted, {"period": 100, "start_step": 10_000}), (Rotated, {"period": 1})]
)
def test_local_sgd_averages_what_some_ranks_reach_and_what_is_complex(module: type, params: dict[str, int]) -> None:
    job = partial(job_for, recipe={**SGD, "module": module}, accumulation_steps=1)
    state, _ = trained(job(strategy="localSGD", strategy_params=params), 3, seconds=40)
    wanted, _ = trained(job(unused_parameters=True), 3, seconds=40)
    torch.testing.assert_close(state, wanted, atol=1e-5, rtol=0)


def test_looking_at_the_model_does_not_change_local_training() -> None:
    job = partial(job_for, recipe=SGD, strategy="localSGD", strategy_params={"period": 5})
    often, seldom = (trained(made, 2)[0] for made in (job(), job(validation_interval=100)))
    assert all(torch.equal(often[name], seldom[name]) for name in often)


def with_penalty(module: nn.Module, batch: Any) -> torch.Tensor:
    rows: torch.Tensor = module(*batch.inputs) + sum(p.square().sum() for p in module.parameters())
    return rows


def test_a_step_that_computes_with_parts_of_parameters_is_told_so() -> None:
    job = job_for(recipe={"training_step": with_penalty}, strategy="zero3", strategy_params=PARTED)
    with pytest.raises(ModuleError, match=r"(?s)computes with parameters .* outside of its forward pass.*weight_decay"):
        trained(job, 2)


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


class Dropped(nn.Module):
    """A block that returns its input, as one of stochastic depth that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Doubled(nn.Module):
    """Changes in place what a block returns, and computes with the block's input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(5, 8), Dropped(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x)
        out = self.block(rows)
        out.mul_(2)
        last: torch.Tensor = self.last(out + rows)
        return last.squeeze(1)


def test_a_change_of_what_a_part_returns_of_its_input_is_refused_and_not_trained_otherwise() -> None:
    job = job_for(recipe={"module": Doubled}, strategy="zero3", strategy_params={"wrap_classes": ["Dropped"]})
    with pytest.raises(SparkTorchError, match="is a view and is being modified inplace"):
        trained(job, 2)


@pytest.mark.parametrize(
    ("strategy", "params"),
    [
        ("zero3", {"min_parameters": 9}),
        ("mesh", {"tensor": 2, "plan": {"second": "colwise_gather_output"}}),
    ],
)
def test_what_parts_return_may_be_changed_in_place(strategy: str, params: dict[str, Any]) -> None:
    recipe = {"module": InPlace}
    close(trained(job_for(recipe=recipe, strategy=strategy, strategy_params=params), 2), plain(recipe))
