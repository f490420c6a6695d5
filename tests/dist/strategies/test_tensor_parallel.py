"""Layers divided among ranks that compute on the same rows: they train as one process does, on any mesh."""

from __future__ import annotations

import contextlib
import copy
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.config import CheckpointConfig
from sparktorch.base.world import World
from sparktorch.data.columns import VALIDATION
from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.huggingface.folder import opened
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.dtensor import TENSOR, local, mesh_of_training, step_on_both, whole
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.registry import build_strategy, check_module, check_strategy
from sparktorch.train.tensor_parallel.styles import check_plan, shard_layers
from sparktorch.worker import TrainJob
from tests.dist.strategies.test_strategies import CONTRARY, FEW_STEPS, PARTED, TABLE, Weights, job_for, plain
from tests.dist.train import test_huggingface as texts
from tests.support.nets import Bags, Gated, Paired, Tower
from tests.support.ranks import control_server, in_group, run_ranks, train_on
from tests.support.resume import Counts, OwnSteps, timeless
from tests.support.tiny_transformers import causal, llama, qwen, shortened

FEW = Batch((torch.ones(2, 5),), None, None, 2)
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "layers": (2, {"tensor": 2}),
    "layers in four parts, of which some do not divide": (4, {"tensor": 4}),
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


def test_gradients_are_clipped_as_those_of_one_model_averages_are_kept_and_training_stops_early() -> None:
    parts = [part.batches() for part in CONTRARY.parts(4)]
    averaged = {"clip_norm": 0.05, "ema_decay": 0.9, "patience": 1, "epochs": 9}
    for clips in (averaged, {**FEW_STEPS, "clip_value": 0.01}):
        mine, metas = train_on(parts, tensor_job({"shard": 2, "tensor": 2}, **clips))
        other, expected = train_on([CONTRARY.batches()], job_for(recipe={"module": Paired}, **clips))
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
        epochs = [len(found[0]["history"]) for found in (metas, expected)]
        assert epochs == ([2, 2] if "patience" in clips else [1, 1])
        norms = [found[0]["history"][-1]["gradient_norm"] for found in (metas, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_dropout_draws_the_same_numbers_in_the_ranks_that_share_a_layer(tmp_path: Path) -> None:
    recipe = {"module_params": {"dropout": 0.4}, "callbacks": [Weights(tmp_path)]}
    job = tensor_job({"tensor": 2}, recipe=recipe, **FEW_STEPS)
    state, _ = train_on([part.batches() for part in TABLE.parts(4)], job)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    kept, _ = plain(of=Paired, batch_size=64, epochs=1)
    assert any(not torch.allclose(value, kept[name], atol=1e-3) for name, value in state.items())


def test_a_table_of_embeddings_is_divided_by_rows() -> None:
    job = tensor_job({"tensor": 2, "plan": {"table": "rowwise", "o*": "rowwise"}}, recipe={"module": Bags})
    with pytest.raises(ConfigError, match="out"):  # what it takes is not divided, so it must not be either
        check_module(
            replace(job.config, strategy_params={"tensor": 3, "plan": {"out": "rowwise"}}), job.recipe, 3, Bags(), FEW
        )
    job = tensor_job({"tensor": 2, "plan": {"table": "rowwise"}}, recipe={"module": Bags}, **FEW_STEPS)
    state, _ = train_on([part.batches() for part in TABLE.parts(2)], job)
    torch.testing.assert_close(state, plain(of=Bags, batch_size=64, epochs=1)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("shard", "model"), [(1, qwen()), (2, llama())], ids=["qwen3", "llama"])
def test_a_model_of_transformers_is_divided_by_its_own_plan(shard: int, model: Any) -> None:
    table = texts.sentences(causal, labelled=False)
    params = {"tensor": 2, "shard": shard}
    job = texts.job_for(table, model, strategy="mesh", strategy_params=params, micro_batch_size=7, epochs=1)
    found, _ = train_on([part.batches() for part in table.parts(2 * shard)], job)
    expected, _ = train_on([table.batches()], texts.job_for(table, model, epochs=1))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_ranks_whose_texts_are_padded_to_another_length_are_told_to_pad_them_alike() -> None:
    table = texts.sentences(shortened, labelled=False)
    job = texts.job_for(table, llama(), strategy="mesh", strategy_params={"tensor": 2}, batch_size=6)
    with pytest.raises(ModuleError, match=r"(?s)tensors of other shapes.*pad inputs to a fixed length"):
        train_on([part.batches() for part in table.parts(2)], job)


@pytest.mark.landing
def test_a_training_that_was_killed_goes_on_to_the_same_bits_and_on_another_mesh(tmp_path: Path) -> None:
    parts = [part.batches() for part in TABLE.parts(4)]

    def job(folder: str, sizes: dict[str, int], dropout: float, **kill: int) -> TrainJob:
        (tmp_path / folder).mkdir(exist_ok=True)
        kind = OwnSteps if folder == "other" else Counts
        recipe = {"module_params": {"dropout": dropout}, "callbacks": [kind(tmp_path / folder, **kill)]}
        made = tensor_job(sizes, recipe=recipe, **FEW_STEPS)
        checkpoint = CheckpointConfig(directory=str(tmp_path / folder / "saved"), unit="step", interval=1, owner="me")
        return replace(made, checkpoint=checkpoint)

    def killed(made: TrainJob) -> None:
        with control_server() as server:
            run_ranks(server, parts, made)

    same = {"shard": 2, "tensor": 2}
    expected, wanted = train_on(parts, job("calm", same, 0.4))
    killed(job("rough", same, 0.4, rank=3, step=3))
    found, metas = train_on(parts, job("rough", same, 0.4))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert timeless(metas[0]["history"]) == timeless(wanted[0]["history"])
    assert int((tmp_path / "rough" / "steps-0").read_text()) == int((tmp_path / "calm" / "steps-0").read_text())
    killed(job("other", same, 0.0, rank=3, step=3))
    found, _ = train_on(parts, job("other", {"tensor": 4}, 0.0))
    assert int((tmp_path / "other" / "steps-0").read_text()) < 5  # those before the kill are not taken again
    torch.testing.assert_close(found, plain(of=Paired, batch_size=64, epochs=1)[0], atol=1e-5, rtol=0)


class TwoNames(nn.Module):
    """Has the layers of a Sequential under names of their own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 4), nn.Linear(4, 2)
        self.net = nn.Sequential(self.fc1, nn.ReLU(), self.fc2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found


def under_other_names(world: World) -> bool:
    """Whether layers that are known by their second name compute what the whole ones do."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    module, x = TwoNames(), torch.ones(3, 5)
    expected = module(x)
    mesh = mesh_of_training([group], "cpu", torch.arange(2), [TENSOR])
    shard_layers(module, mesh, check_plan(module, {}, 2), lambda part: None)
    return hasattr(module.fc1.weight, "device_mesh") and torch.allclose(module(x), expected)


def test_layers_with_two_names_are_divided() -> None:
    assert in_group(2, under_other_names) == [True, True]


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
        (
            Paired,
            {"tensor": 2, "plan": {"first.*": "colwise"}},
            ConfigError,
            "a torch.nn.modules.activation.Tanh",
        ),
        (
            Paired,
            {"tensor": 4, "plan": {"first.2": "colwise"}},
            ConfigError,
            r"whose \(6, 8\) weights are not divisible by 4",
        ),
        (Tower, {"tensor": 3, "plan": {"tied": "colwise"}}, ConfigError, "whose weights are tied"),
        (Tower, {"tensor": 3}, ConfigError, "no layers that are known"),
        (partial(nn.LSTM, 5, 4), {"tensor": 2}, ConfigError, r"(?s)LSTM has no layers that.*strategyParams.shard"),
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
        check_module(job.config, job.recipe, 2, module(), FEW)


PAIR = {"fc1": "colwise", "fc2": "rowwise"}


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
            check_module(config, recipe, 4, recipe.build_module(0), FEW)


def test_a_module_without_a_row_for_each_row_is_refused_in_the_rank() -> None:
    with control_server() as server:
        job = tensor_job({"tensor": 2}, recipe={"module": Summed, "loss": None, "training_step": total_of})
        ended = run_ranks(server, [part.batches() for part in TABLE.parts(2)], job)
    assert {rank.error for rank in ended} == {"ModuleError"}


def total_of(module: nn.Module, batch: Any) -> torch.Tensor:
    total: torch.Tensor = module(*batch.inputs)
    return total


def of_its_parts(module: Any, batch: Any) -> torch.Tensor:
    total: torch.Tensor = module.fc2(module.act(module.fc1(*batch.inputs))).sum()
    return total


def test_a_step_that_computes_parts_by_themselves_is_refused_before_the_job() -> None:
    config = tensor_job({"tensor": 2, "plan": PAIR}).config
    check_module(config, Recipe(module=Gated, training_step=total_of), 2, Gated(), FEW)
    with pytest.raises(ModuleError, match="computes 'fc1' outside of a call of the module"):
        check_module(config, Recipe(module=Gated, training_step=of_its_parts), 2, Gated(), FEW)


class Peeking(nn.Module):
    """Uses all of a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc1(x)).sum(-1)


class Softened(nn.Module):
    """Takes all of a hidden layer together, before a layer that is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 8), nn.Linear(8, 1)
        nn.init.zeros_(self.fc2.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.fc1(x).softmax(-1)).squeeze(-1)
        return out


class InPlace(nn.Module):
    """Layers whose activation works in place, and attention whose parts are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x).view(-1, 2, 4)
        out = self.layer(inner)
        out += inner
        last: torch.Tensor = self.last(out.mean(1)).squeeze(-1)
        return last


class Shifted(nn.Module):
    """Changes its input in place, by a parameter, and what a table returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.table = nn.Parameter(torch.ones(5)), nn.Embedding(2, 8)
        self.fc1, self.fc2 = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.shift
        kind = self.table((x[:, 0] > 0).long())
        kind *= 2.0
        out: torch.Tensor = self.fc2(torch.tanh(self.fc1(x) + kind)).squeeze(-1)
        return out


class Drawing(Gated):
    """Scales its hidden layer by a number of Python's, as layers that are skipped by chance do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.uniform(0.5, 1.5))


class Moved(Gated):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.add_(1.0))


# Not Adam: a bias of the keys has no gradient but rounding, of which Adam makes steps.
STEEP: dict[str, Any] = {"optimizer": "SGD", "optimizer_params": {}, "learning_rate": 0.1}


def descended(module: type[nn.Module]) -> dict[str, torch.Tensor]:
    return plain(of=module, kind=torch.optim.SGD, lr=0.1, batch_size=64, epochs=1)[0]


def test_numbers_that_python_draws_are_the_same_in_the_comparison_of_a_plan() -> None:
    params = {"tensor": 2, "plan": {**PAIR, "act": "sum_gradients"}}
    train_on([part.batches() for part in TABLE.parts(2)], tensor_job(params, recipe={"module": Drawing}, **FEW_STEPS))


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Gated, {"plan": {**PAIR, "act": "sum_gradients"}}),
        (Moved, {"plan": {**PAIR, "act": "sum_gradients"}}),
        (InPlace, {}),
        (InPlace, {"sequence": True}),
        (Shifted, {"plan": {"table": "rowwise"}}),
    ],
)
def test_parameters_between_divided_layers_and_changes_in_place_train_as_in_one_process(
    module: type[nn.Module], options: dict[str, Any]
) -> None:
    job = tensor_job({"tensor": 2, **options}, recipe={"module": module, **STEEP}, **FEW_STEPS)
    state, _ = train_on([part.batches() for part in TABLE.parts(2)], job)
    torch.testing.assert_close(state, descended(module), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("module", "plan", "says"),
    [
        (Gated, PAIR, "(?s)another gradient of 'act.weight' than the undivided one.*'sum_gradients'"),
        (Peeking, {"fc1": "colwise"}, "Peeking, with its layers divided, returns something else"),
        (Softened, PAIR, "Softened, with its layers divided, returns something else"),
        (Gated, {"fc2": "rowwise"}, "(?s)Gated, with its layers divided, fails: RuntimeError.*takes what a 'colwise'"),
    ],
)
def test_a_plan_that_computes_something_else_is_refused_before_the_first_step(
    module: type[nn.Module], plan: dict[str, str], says: str
) -> None:
    job = tensor_job({"tensor": 2, "plan": plan}, recipe={"module": module})
    with pytest.raises(ModuleError, match=says):
        train_on([part.batches() for part in TABLE.parts(2)], job)


def test_a_plan_that_computes_something_else_in_a_stage_is_refused_before_the_first_step() -> None:
    module = nn.Sequential(nn.Linear(5, 8), nn.Softmax(-1), nn.Linear(8, 4), nn.Linear(4, 1), nn.Flatten(0))
    params = {"tensor": 2, "pipeline": 2, "split": ["3"], "plan": {"0": "colwise", "2": "rowwise"}}
    job = job_for(recipe={"module": module}, strategy="mesh", strategy_params=params, accumulation_steps=1)
    with pytest.raises(ModuleError, match="Stage, with its layers divided, returns something else"):
        train_on([part.batches() for part in TABLE.parts(4)], job)


def test_attention_is_gathered_as_a_whole_under_zero3() -> None:
    recipe = {"module": InPlace, **STEEP}
    job = job_for(recipe=recipe, strategy="zero3", strategy_params={"min_parameters": 10}, **FEW_STEPS)
    state, _ = train_on([part.batches() for part in TABLE.parts(2)], job)
    torch.testing.assert_close(state, descended(InPlace), atol=1e-5, rtol=0)


@dataclass
class Output:
    value: torch.Tensor


class Odd(nn.Module):
    """Returns what is asked for, of a divided layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, scale: Any = 1.0, *, kind: str = "plain") -> Any:
        if kind == "failing":
            raise ValueError("as asked")
        out = self.net(x) * scale
        if kind == "complex":
            return torch.complex(out, out)
        return Output(out) if kind == "dataclass" else {"twice": 2 * out, "rows": out} if kind == "dict" else out


def calls(world: World) -> dict[str, Any]:
    """What own loops do with a wrapped module, in one of two ranks."""
    config = tensor_job({"tensor": 2}).config
    torch.manual_seed(0)
    odd = Odd()
    module = build_strategy(config, world).prepare(copy.deepcopy(odd), Start())
    x = torch.randn(2 + world.rank, 5).requires_grad_()
    module(x).sum().backward()
    (expected,) = torch.autograd.grad(odd(x).sum(), x)
    found: dict[str, Any] = {"gradient": torch.allclose(cast(torch.Tensor, x.grad), expected, atol=1e-6)}
    module.zero_grad()
    outputs = module(x.detach(), kind="dict")
    outputs["rows" if world.rank else "twice"].sum().backward()  # each rank uses another one
    found["meets"] = True
    found["complex"] = module(x.detach(), kind="complex").requires_grad
    before = torch.get_rng_state()
    with contextlib.suppress(ValueError):
        module(x.detach(), kind="failing")
    torch.randint(2**31, ())  # the one draw of an exchange
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randint(2**31, ()), torch.randint(2**31, ())
    found["generator"] = torch.equal(after, torch.get_rng_state())
    for name, arguments in {
        "dataclass": {"kind": "dataclass"},
        "number": {"scale": float(world.rank)},
        "tensor": {"scale": torch.tensor(float(world.rank))},
    }.items():
        with pytest.raises(ModuleError) as error:
            module(x.detach(), **arguments)
        found[name] = str(error.value)
    return found


def test_own_loops_get_gradients_of_inputs_and_differing_calls_are_refused_in_all_ranks() -> None:
    for found in in_group(2, calls):
        assert found["gradient"]
        assert found["meets"]
        assert found["complex"]
        assert found["generator"]
        assert "type Output" in found["dataclass"]
        assert "with other numbers" in found["number"]
        assert "with other numbers" in found["tensor"]


def beyond(world: World) -> str:
    config = tensor_job({"tensor": 2, "plan": {"0": "rowwise"}}).config
    module = build_strategy(config, world).prepare(nn.Sequential(nn.Embedding(12, 4)), Start())
    module(torch.tensor([3]))
    with pytest.raises(RuntimeError) as error:
        module(torch.tensor([-1]))
    return str(error.value)


def test_an_index_beyond_a_divided_table_is_refused() -> None:
    assert all("not one of the 12 rows" in found for found in in_group(2, beyond))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (nn.Embedding(8, 4, max_norm=1.0), "with max_norm or scale_grad_by_freq"),
        (nn.Embedding(8, 4, sparse=True), "part has sparse gradients"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "divides only nn.Linear and nn.Embedding"),
        (nn.MultiheadAttention(4, 2).out_proj, "divides only nn.Linear and nn.Embedding"),
    ],
)
def test_layers_that_compute_in_their_own_way_are_refused(part: nn.Module, says: str) -> None:
    module = nn.ModuleDict({"part": part})
    config = tensor_job({"tensor": 2, "plan": {"part": "rowwise"}}).config
    with pytest.raises((ConfigError, ModuleError), match=says):
        check_module(config, Recipe(module=module), 2, module, FEW)


def stepped(world: World, kind: str, params: dict[str, Any]) -> list[Any]:
    """The parameters, of which some are divided, after steps of an optimizer that takes lists of them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    if world.world_size > 1:
        mesh = mesh_of_training([dist.group.WORLD], "cpu", torch.arange(2), ["tensor"])
        shard_layers(module, mesh, {"0": "colwise", "1": "rowwise"}, lambda part: None)
    groups = [{"params": module[:2].parameters()}, {"params": module[2:].parameters(), "lr": 0.1}]
    optimizer = getattr(torch.optim, kind)(groups, **params)
    if world.world_size > 1:
        step_on_both(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return [whole(parameter.detach()).tolist() for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("AdamW", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("SGD", {"foreach": True, "momentum": 0.9}),
        ("RMSprop", {"foreach": True}),
    ],
)
def test_an_optimizer_steps_on_lists_of_divided_and_whole_parameters(kind: str, params: dict[str, Any]) -> None:
    expected = stepped(World(), kind, params)
    for found in in_group(2, stepped, kind, params):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=0)


def of_rows(world: World) -> list[tuple[int, ...]]:
    """The shapes of what a rank has of a table and of its gradient, before a step and after that of an average."""
    config = tensor_job({"tensor": 2, "plan": {"table": "rowwise"}}).config
    strategy = build_strategy(config, world)
    module = strategy.prepare(Bags(), Start())
    optimizer = strategy.optimizer(Recipe(module=Bags, **STEEP | {"optimizer_params": {"momentum": 0.9}}), module)
    module(torch.rand(3 + world.rank, 5)).sum().backward()
    strategy.gradients(module).complete()
    optimizer.step()
    table: Any = module.table.weight
    return [tuple(local(each).shape) for each in (table, table.grad, optimizer.state[table]["momentum_buffer"])]


def test_a_rank_with_rows_of_a_table_has_those_of_its_gradient_and_average() -> None:
    for shapes in in_group(2, of_rows):
        assert len(set(shapes)) == 1


def lists_of_all(world: World) -> dict[str, bool]:
    """Whether torch's functions take lists of all parameters of a module that a user's loop has."""
    strategy = build_strategy(tensor_job({"tensor": 2}).config, world, in_users_loop=True)
    module = strategy.prepare(Paired(), Start())
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    with strategy.gradients(module).no_sync():
        module(torch.rand(4, 5)).sum().backward()
    module(torch.rand(4, 5)).sum().backward()
    nn.utils.clip_grad_value_(module.parameters(), 1e-3)
    optimizer.step()
    return {
        "clipped": all(float(local(p.grad).abs().max()) <= 1.001e-3 for p in module.parameters() if p.grad is not None)
    }


def test_in_a_users_loop_torch_takes_lists_of_all_parameters() -> None:
    assert in_group(2, lists_of_all) == [{"clipped": True}] * 2
