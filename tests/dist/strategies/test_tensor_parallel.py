"""Layers divided among ranks that compute on the same rows: they train as one process does, on any mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.base.config import CheckpointConfig
from sparktorch.data.columns import VALIDATION
from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.recipe.huggingface import opened
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import check_module, check_strategy
from sparktorch.worker import TrainJob
from tests.dist.strategies.test_strategies import PARTED, TABLE, Weights, job_for, plain
from tests.dist.train import test_huggingface as texts
from tests.support.nets import Bags, Paired, Tower
from tests.support.ranks import control_server, run_ranks, train_on
from tests.support.resume import Counts, timeless
from tests.support.tiny_transformers import causal, llama, shortened

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "layers": (2, {"tensor": 2}),
    "copies of layers": (4, {"tensor": 2}),
    "layers in four parts, of which some do not divide": (4, {"tensor": 4}),
    "shards of layers": (4, {"shard": 2, "tensor": 2}),
    "all three": (8, {"data": 2, "shard": 2, "tensor": 2}),
}


def tensor_job(sizes: dict[str, Any], *, recipe: dict[str, Any] | None = None, **config: Any) -> TrainJob:
    return job_for(
        recipe={"module": Paired, **(recipe or {})}, strategy="mesh", strategy_params={**PARTED, **sizes}, **config
    )


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, torch.Tensor], float]:
    return plain(of=Paired)


@pytest.mark.parametrize("case", MESHES)
def test_ranks_train_what_one_plain_loop_trains_and_end_with_the_same_bits(
    case: str, expected: tuple[dict[str, torch.Tensor], float], tmp_path: Path
) -> None:
    ranks, sizes = MESHES[case]
    job = tensor_job(sizes, recipe={"callbacks": [Weights(tmp_path)]})
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], job)
    torch.testing.assert_close(state, expected[0], atol=1e-5, rtol=0)
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(expected[1], abs=1e-5)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_ranks_without_rows_take_part_and_change_nothing(expected: tuple[dict[str, torch.Tensor], float]) -> None:
    held_out = TABLE.arrays[VALIDATION]
    parts = [TABLE.take(~held_out).batches(), [], TABLE.take(held_out).batches(), []]
    job = replace(tensor_job({"tensor": 2}), placeholder=TABLE.batches()[0].slice(7, 1))
    state, metas = train_on(parts, job)
    torch.testing.assert_close(state, expected[0], atol=1e-5, rtol=0)
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(expected[1], abs=1e-5)


def test_gradients_are_clipped_as_those_of_one_model_and_averages_are_kept() -> None:
    parts = [part.batches() for part in TABLE.parts(4)]
    for clips in ({"clip_norm": 0.05, "ema_decay": 0.9, "patience": 1, "epochs": 4}, {"clip_value": 0.01}):
        mine, metas = train_on(parts, tensor_job({"shard": 2, "tensor": 2}, **clips))
        other, expected = train_on([TABLE.batches()], job_for(recipe={"module": Paired}, **clips))
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
        norms = [found[0]["history"][-1]["gradient_norm"] for found in (metas, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_dropout_draws_the_same_numbers_in_the_ranks_that_share_a_layer(tmp_path: Path) -> None:
    recipe = {"module_params": {"dropout": 0.4}, "callbacks": [Weights(tmp_path)]}
    state, _ = train_on([part.batches() for part in TABLE.parts(4)], tensor_job({"tensor": 2}, recipe=recipe))
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    assert any(not torch.allclose(value, plain(of=Paired)[0][name], atol=1e-3) for name, value in state.items())


def test_a_table_of_embeddings_is_divided_by_rows() -> None:
    job = tensor_job({"tensor": 2, "plan": {"table": "rowwise", "o*": "rowwise"}}, recipe={"module": Bags})
    with pytest.raises(ConfigError, match="out"):  # what it takes is not divided, so it must not be either
        check_module(replace(job.config, strategy_params={"tensor": 3, "plan": {"out": "rowwise"}}), job.recipe, Bags())
    job = tensor_job({"tensor": 2, "plan": {"table": "rowwise"}}, recipe={"module": Bags})
    state, _ = train_on([part.batches() for part in TABLE.parts(2)], job)
    torch.testing.assert_close(state, plain(of=Bags)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("shard", "preprocess"), [(1, shortened), (2, causal)])
def test_a_model_of_transformers_is_divided_by_its_own_plan(shard: int, preprocess: Any) -> None:
    table = texts.sentences(preprocess, labelled=False)
    params = {"tensor": 2, "shard": shard}
    job = texts.job_for(table, llama(), strategy="mesh", strategy_params=params, batch_size=6)
    found, _ = train_on([part.batches() for part in table.parts(2 * shard)], job)
    expected, _ = train_on([table.batches()], texts.job_for(table, llama(), batch_size=6))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_training_that_was_killed_goes_on_to_the_same_bits_and_on_another_mesh(tmp_path: Path) -> None:
    parts = [part.batches() for part in TABLE.parts(4)]

    def job(folder: str, sizes: dict[str, int], dropout: float, **kill: int) -> TrainJob:
        (tmp_path / folder).mkdir(exist_ok=True)
        recipe = {"module_params": {"dropout": dropout}, "callbacks": [Counts(tmp_path / folder, **kill)]}
        made = tensor_job(sizes, recipe=recipe)
        checkpoint = CheckpointConfig(directory=str(tmp_path / folder / "saved"), unit="step", interval=1, owner="me")
        return replace(made, checkpoint=checkpoint)

    def killed(made: TrainJob) -> None:
        with control_server() as server:
            run_ranks(server, parts, made)

    same = {"shard": 2, "tensor": 2}
    expected, wanted = train_on(parts, job("calm", same, 0.4))
    killed(job("rough", same, 0.4, rank=3, step=5))
    found, metas = train_on(parts, job("rough", same, 0.4))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert timeless(metas[0]["history"]) == timeless(wanted[0]["history"])
    assert int((tmp_path / "rough" / "steps-0").read_text()) == int((tmp_path / "calm" / "steps-0").read_text())
    for number, after in enumerate(({"data": 2, "shard": 2}, {"tensor": 4})):
        killed(job(str(number), same, 0.0, rank=3, step=5))
        found, _ = train_on(parts, job(str(number), after, 0.0))
        torch.testing.assert_close(found, plain(of=Paired)[0], atol=1e-5, rtol=0)


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.net(x).sum()
        return total


@pytest.mark.parametrize(
    ("module", "options", "error", "says"),
    [
        (Paired, {"tensor": 5}, ConfigError, "no layers that are known to be divisible by 5"),
        (Paired, {"tensor": 2, "plan": {"frist.*": "colwise"}}, ConfigError, r"(?s)'frist.\*' matches no part.*first"),
        (Paired, {"tensor": 2, "plan": {"first.*": "colwise"}}, ConfigError, "matches 'first.1', a Tanh"),
        (
            Paired,
            {"tensor": 4, "plan": {"first.2": "colwise"}},
            ConfigError,
            r"whose \(6, 8\) weights are not divisible by 4",
        ),
        (Tower, {"tensor": 3, "plan": {"tied": "colwise"}}, ConfigError, "whose weights are tied"),
        (Tower, {"tensor": 3}, ConfigError, "no layers that are known"),
        (Normalised, {"tensor": 2}, ModuleError, "1 is batch normalisation"),
        (Paired, {"shard": 2, "plan": {"first.0": "colwise"}}, ConfigError, "no tensor ranks"),
        (Paired, {"tensor": 2, "plan": {"first.0": "columns"}}, ConfigError, "first.0"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_the_job(
    module: type[nn.Module], options: dict[str, Any], error: type[Exception], says: str
) -> None:
    job = job_for(recipe={"module": module}, strategy="mesh", strategy_params=options)
    with pytest.raises(error, match=says):
        check_module(job.config, job.recipe, module())


def test_heads_that_cannot_be_divided_and_losses_of_rows_are_refused_before_the_job() -> None:
    for kind, tensor, says in (
        ("LlamaForCausalLM", 4, "num_key_value_heads is 2"),
        ("LlamaForSequenceClassification", 2, "computes the loss of its rows"),
    ):
        found = opened(llama(kind), {}, seed=0)
        assert found is not None
        recipe = Recipe(**found, loss=None, training_step=texts.MODEL_LOSS)
        config = job_for(strategy="mesh", strategy_params={"tensor": tensor}).config
        check_strategy(config, recipe)
        with pytest.raises(ConfigError, match=says):
            check_module(config, recipe, recipe.build_module(0))


def test_a_module_without_a_row_for_each_row_is_refused_in_the_rank() -> None:
    with control_server() as server:
        job = tensor_job({"tensor": 2}, recipe={"module": Summed, "loss": None, "training_step": total_of})
        ended = run_ranks(server, [part.batches() for part in TABLE.parts(2)], job)
    assert {rank.error for rank in ended} == {"ModuleError"}


def total_of(module: nn.Module, batch: Any) -> torch.Tensor:
    total: torch.Tensor = module(*batch.inputs)
    return total
