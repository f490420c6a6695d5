"""Every strategy trains on devices what it trains on CPUs."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.errors import ModuleError
from tests.device.jobs import close, job_of, trained, waits_in_steps

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, gradients in bf16": {"strategy_params": {"comm_hook": "bf16"}},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2", "strategy_params": {"min_parameters": 1}},
    "zero3": {"strategy": "zero3", "strategy_params": {"min_parameters": 1}},
    "zero3, activations computed again": {
        "strategy": "zero3",
        "strategy_params": {"min_parameters": 1, "activation_checkpointing": True},
    },
    "mesh": {"strategy": "mesh", "strategy_params": {"shard": 2, "min_parameters": 1}},
    "mesh, layers": {"strategy": "mesh", "strategy_params": {"tensor": 2}},
    "mesh, stages": {"strategy": "mesh", "strategy_params": {"pipeline": 2}},
    "localSGD": {"strategy": "localSGD", "strategy_params": {"period": 2}},
    "localSGD, together at first": {"strategy": "localSGD", "strategy_params": {"start_step": 3}},
    "independent": {"strategy": "independent"},
}


class Wide(nn.Module):
    """Most of its memory is parameters, in parts of equal size. Its rank collects no garbage, so that a cycle shows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        gc.disable()
        self.first = nn.Linear(6, 128)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(16)))
        self.last = nn.Linear(128, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.blocks(self.first(x).tanh())).squeeze(-1)
        return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_trains_what_it_trains_on_cpus(strategy: str) -> None:
    job = job_of(validated=True, weighted=True, **STRATEGIES[strategy])
    expected, _ = trained(job, ranks=2, device="cpu")
    state, metas = trained(job, ranks=2)
    close(state, expected)
    assert not waits_in_steps(metas)


class Attending(nn.Module):
    """Attention with dropout, and scores of words of which each row's loss is computed within the module."""

    plan = {"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise", "head": "colwise_gather_output"}

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.head, self.drop = nn.Linear(6, 4 * 8), nn.Linear(8, 12), nn.Dropout(dropout)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.first(x).view(-1, 4, 8)
        q, k, v = (part(places).unflatten(2, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        scores = self.head(self.out(self.drop(attended)))
        return (scores.logsumexp(-1) - scores[..., 0]).mean(1)


class Native(nn.Module):
    """A pair of layers with something between them that the host cannot compute, as kernels of GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            raise NotImplementedError("no kernel for the host")
        out: torch.Tensor = self.last(torch.tanh(self.first(x))).squeeze(-1)
        return out


class Mixing(Native):
    """Has a function of all columns between its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).softmax(-1)).squeeze(-1)
        return out


def test_a_plan_is_compared_on_the_device_of_a_rank() -> None:
    params = {"tensor": 2, "plan": {"first": "colwise", "last": "rowwise"}}
    recipe = {"module": Native, "module_params": {}, "optimizer": "SGD"}
    state, _ = trained(job_of(validated=True, strategy="mesh", strategy_params=params, recipe=recipe), ranks=2)
    assert all(value.isfinite().all() for value in state.values())
    wrong = job_of(strategy="mesh", strategy_params=params, recipe={**recipe, "module": Mixing})
    with pytest.raises(ModuleError, match="Mixing, with its layers divided, returns something else"):
        trained(wrong, ranks=2)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_and_scores_that_are_divided_train_as_on_cpus_and_wait_for_nothing(dropout: float) -> None:
    recipe = {"module": Attending, "module_params": {"dropout": dropout}, "optimizer": "SGD"}
    params = {"tensor": 2, "plan": Attending.plan}
    job = job_of(validated=True, strategy="mesh", strategy_params=params, recipe=recipe)
    state, metas = trained(job, ranks=2)
    assert not waits_in_steps(metas)
    assert all(value.isfinite().all() for value in state.values())
    if not dropout:  # devices draw other numbers
        close(state, trained(job, ranks=2, device="cpu")[0])


def test_a_parameter_server_waits_for_what_is_known() -> None:
    # The gradients have to be on the host before they can be sent; so the loss may be looked at before, each time.
    waited = (
        "module_of(device).current_stream(torch.device(device)).synchronize()",
        "value = loss.item()",
    )
    job = job_of(strategy="parameterServer", strategy_params={"staleness": 0})
    state, metas = trained(job, ranks=2)
    close(state, trained(job, ranks=2, device="cpu")[0])
    waits = waits_in_steps(metas)
    steps = 2 * 2 * metas[0]["steps_per_epoch"]  # of two ranks, over two epochs
    assert [len([wait for wait in waits if line in wait]) for line in waited] == [steps] * len(waited)
    assert not [wait for wait in waits if not any(line in wait for line in waited)]


def test_sharded_gradients_are_clipped_where_they_lie_on_the_host() -> None:
    options = {"strategy": "zero3", "clip_norm": 0.1, "strategy_params": {"min_parameters": 1}}
    expected, _ = trained(job_of(**options), ranks=2, device="cpu")
    options["strategy_params"] = {"min_parameters": 1, "cpu_offload": True}
    state, _ = trained(job_of(**options), ranks=2)
    close(state, expected)


def test_a_sharded_module_never_lies_on_a_device_as_a_whole() -> None:
    whole = sum(parameter.nbytes for parameter in Wide("dense").parameters())
    recipe = {"module": Wide, "optimizer": "SGD", "freeze": ("blocks.*",)}  # no gradients beside the parameters
    options: dict[str, Any] = {"recipe": recipe, "batch_size": 2, "epochs": 1}
    _, metas = trained(job_of(strategy="zero3", strategy_params={"min_parameters": 10_000}, **options), ranks=2)
    assert max(meta["peak_device_memory"] for meta in metas) < 0.8 * whole
    _, metas = trained(job_of(**options), ranks=2)
    assert min(meta["peak_device_memory"] for meta in metas) > whole


@pytest.mark.parametrize(
    ("options", "strategy"),
    [({"cpu_offload": True}, "zero3"), ({"shard": 1, "tensor": 2}, "mesh"), ({"pipeline": 2}, "mesh")],
)
def test_a_model_that_ranks_write_is_that_of_cpus(options: dict[str, Any], strategy: str, tmp_path: Path) -> None:
    job = job_of(
        validated=True, patience=1, epochs=3, strategy=strategy, strategy_params={"min_parameters": 1, **options}
    )
    parted = replace(job, config=replace(job.config, model_folder=str(tmp_path / "model")))
    if "cpu_offload" in options:
        job = replace(job, config=replace(job.config, strategy_params={"min_parameters": 1}))
    job = replace(job, config=replace(job.config, model_folder=str(tmp_path / "of_cpus")))  # the same initial values
    expected, _ = trained(job, ranks=2, device="cpu")
    state, _ = trained(parted, ranks=2)
    close(state, expected)
