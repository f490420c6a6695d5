"""Sequences that are divided between divided layers: ranks train what one process does, and keep less."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparktorch.base.batch import Batch
from sparktorch.base.config import CheckpointConfig, TrainConfig
from sparktorch.base.world import World
from sparktorch.data.columns import VALIDATION
from sparktorch.errors import ConfigError
from sparktorch.train.plan.memory import plan
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.dtensor import local, whole
from sparktorch.train.strategies.registry import check_module, check_strategy
from sparktorch.train.tensor_parallel.styles import SUMMED, check_plan, shard_layers
from sparktorch.worker import TrainJob
from tests.dist.strategies.test_strategies import FEW_STEPS, TABLE, Weights, job_for, plain
from tests.support.attention_nets import Encoder, Sequences, Translator
from tests.support.nets import Paired
from tests.support.ranks import control_server, in_group, of_two_ranks, run_ranks, train_on
from tests.support.resume import OwnSteps, timeless

# A bias of the keys has no gradient but rounding, of which Adam would make steps with its own `eps`.
STEADY: dict[str, Any] = {"optimizer": "AdamW", "optimizer_params": {"eps": 1e-2}, "learning_rate": 0.01}
# torch looks up once how an operator divides each shape, which takes longer than to compute: there are few of them.
SMALL: dict[str, Any] = {"layers": 1, "feedforward": 8}
FEW = Batch((torch.ones(2, 5),), None, None, 2)


def sequence_job(
    module: Any, sizes: dict[str, Any], *, recipe: dict[str, Any] | None = None, **config: Any
) -> TrainJob:
    params = {"min_parameters": 200, "sequence": True, **sizes}
    return job_for(
        recipe={"module": module, **STEADY, **(recipe or {})}, strategy="mesh", strategy_params=params, **config
    )


def descended(module: Any, **config: Any) -> tuple[dict[str, torch.Tensor], float]:
    return plain(of=module, lr=0.01, eps=1e-2, **config)


@pytest.mark.parametrize(
    ("ranks", "norm_first", "sizes", "config"),
    [
        (2, False, {"tensor": 2, "activation_checkpointing": True}, {"accumulation_steps": 1}),
        (4, True, {"shard": 2, "tensor": 2}, {"accumulation_steps": 1}),
        pytest.param(4, False, {"tensor": 4}, {**FEW_STEPS, "accumulation_steps": 2}, marks=pytest.mark.landing),
    ],
)
def test_ranks_with_some_positions_train_what_one_plain_loop_trains(
    ranks: int, norm_first: bool, sizes: dict[str, Any], config: dict[str, Any]
) -> None:
    module: Any = partial(Sequences, norm_first=norm_first, **SMALL)
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], sequence_job(module, sizes, **config))
    expected, loss = descended(module, **{name: config[name] for name in ("batch_size", "epochs") if name in config})
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.landing
def test_a_rank_without_rows_has_some_positions_and_gradients_are_clipped_as_those_of_one_model() -> None:
    held_out = TABLE.arrays[VALIDATION]
    parts = [TABLE.take(~held_out).batches(), TABLE.take(held_out).batches()]
    module, config = partial(Sequences, **SMALL), {**FEW_STEPS, "clip_norm": 0.05}
    job = replace(sequence_job(module, {"tensor": 2}, **config), placeholder=TABLE.batches()[0].slice(7, 1))
    state, metas = train_on(parts, job)
    alone = job_for(recipe={"module": module, **STEADY}, **config)
    expected, wanted = train_on([TABLE.batches()], alone)
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)
    for name in ("gradient_norm", "val_loss"):
        values = [found[0]["history"][-1][name] for found in (metas, wanted)]
        assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_ranks_that_drop_numbers_of_their_positions_end_with_the_same_bits(tmp_path: Path) -> None:
    recipe = {"module_params": {"dropout": 0.4, **SMALL}, "callbacks": [Weights(tmp_path)]}
    job = sequence_job(Sequences, {"tensor": 2}, recipe=recipe, **FEW_STEPS)
    state, metas = train_on([part.batches() for part in TABLE.parts(2)], job)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    assert all(value.isfinite().all() for value in state.values())
    assert metas[0]["history"][-1]["val_loss"] < 10


@pytest.mark.landing
def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    parts = [part.batches() for part in TABLE.parts(2)]

    def job(folder: str, **kill: int) -> TrainJob:
        (tmp_path / folder).mkdir(exist_ok=True)
        checkpoint = CheckpointConfig(directory=str(tmp_path / folder / "saved"), unit="step", interval=1, owner="me")
        recipe = {"module_params": {"dropout": 0.4, **SMALL}, "callbacks": [OwnSteps(tmp_path / folder, **kill)]}
        return replace(sequence_job(Sequences, {"tensor": 2}, recipe=recipe, **FEW_STEPS), checkpoint=checkpoint)

    expected, wanted = train_on(parts, job("calm"))
    with control_server() as server:
        run_ranks(server, parts, job("rough", rank=1, step=3))
    found, metas = train_on(parts, job("rough"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert timeless(metas[0]["history"]) == timeless(wanted[0]["history"])
    assert int((tmp_path / "rough" / "steps-0").read_text()) < 5  # those before the kill are not taken again


def stack(norm_first: bool, **kind: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=norm_first, **{"dropout": 0.0, **kind})
    return nn.TransformerEncoder(layer, 2, nn.RMSNorm(8))


def shared() -> nn.Module:
    module = stack(False)
    module.layers[1].norm2 = module.layers[0].norm2
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "a norm of two layers": shared,
    "norms behind": partial(stack, False),
    "norms first": partial(stack, True, activation="gelu", bias=False),
    "single layers": lambda: nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True),) * 2),
    "both stacks": lambda: nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True),
}


def divide_by_plan(module: nn.Module, mesh: DeviceMesh, *, sequence: bool = True, again: bool = True) -> dict[str, str]:
    """Divides the layers that are known to belong together; returns their styles."""
    styles = check_plan(module, {}, mesh.size(), sequence=sequence)
    shard_layers(module, mesh, styles, lambda part: None, sequence=sequence, recompute_allgather=again)
    return styles


def computed(world: World, again: bool) -> dict[str, Any]:
    """What divided modules compute of sequences of several lengths, beside the whole ones."""
    mesh, found = of_two_ranks(), {}
    for name, make in MODULES.items():
        torch.manual_seed(0)
        plain = make()
        for parameter in plain.parameters():
            nn.init.normal_(parameter, std=0.4)
        divided = copy.deepcopy(plain)
        styles = divide_by_plan(divided, mesh, again=again)
        for length, dtype in ((4, None), (5, None), (1, None), (3, torch.bfloat16)):
            x, results = torch.randn(3, length, 8), []
            for module in (plain, divided):
                own = x.clone().requires_grad_()
                given = (own, 2 * own[:, :2]) if name == "both stacks" else (own,)
                module.zero_grad()
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    output = module.train()(*given)
                (output.square().sum() + output[:, 0].sum()).backward()
                for part in (n for n, style in styles.items() if style == SUMMED and module is divided):
                    for parameter in divided.get_submodule(part).parameters():
                        dist.all_reduce(parameter.grad)
                gradients = {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
                with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
                    evaluated = module.eval()(*given)
                results.append((output, evaluated.float(), own.grad, gradients))
            close = {"atol": 2e-5, "rtol": 1e-4} if dtype is None else {"atol": 0.5, "rtol": 0.1}
            try:
                torch.testing.assert_close(results[1], results[0], **close)
                found[f"{name}, {length}"] = True
            except AssertionError as error:
                found[f"{name}, {length}"] = str(error)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1)
    divided = copy.deepcopy(plain)
    divide_by_plan(divided, mesh)
    padding = torch.arange(4)[None] >= torch.tensor([[4], [3]])
    for arguments in ({"mask": causal}, {"src_key_padding_mask": padding}):
        with torch.no_grad():
            outputs = [module.eval()(torch.ones(2, 4, 8), **arguments) for module in (plain, divided)]
        keep = ~padding[..., None]  # torch's kernel for whole layers returns zeros for what is padded
        found[str(arguments)] = torch.allclose(outputs[1] * keep, outputs[0] * keep, atol=1e-5)
    return found


@pytest.mark.parametrize("again", [True, False])
def test_divided_sequences_of_any_length_are_computed_as_whole_ones(again: bool) -> None:
    for found in in_group(2, computed, again):
        assert len(found) == 5 * 4 + 2
        assert not {name: value for name, value in found.items() if value is not True}


def drawn(world: World) -> dict[str, Any]:
    """What is dropped of a rank's positions, and drawn afterwards."""
    torch.manual_seed(3)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.5, batch_first=True), 1)
    divide_by_plan(module, of_two_ranks())
    dropped = []
    module.layers[0].dropout1.register_forward_hook(lambda part, args, out: dropped.append(out.to_local() == 0))
    module(torch.ones(1, 7, 8))
    after = torch.rand(4).tolist()
    module.eval()(torch.ones(1, 7, 8))
    return {"dropped": dropped[0][:, :3].tolist(), "after": after, "kept": not dropped[1].any()}


def test_each_rank_drops_other_numbers_and_afterwards_all_draw_the_same() -> None:
    first, second = in_group(2, drawn)
    assert first["dropped"] != second["dropped"]
    assert first["after"] == second["after"]
    assert first["kept"]
    assert second["kept"]


class Deep(nn.Module):
    """Layers of which nothing but their own activations is kept."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(16), enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)[..., 0].sum(-1)


class Sent(TorchDispatchMode):
    """Counts the collectives of a pass by what they do, and the dtypes of what they gather."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.gathered: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls collectives itself
        self.found.update(kind for kind in ("all_reduce", "all_gather", "reduce_scatter") if kind in str(func))
        self.gathered.update([args[0].dtype] if "all_gather" in str(func) else [])
        return func(*args, **(kwargs or {}))


def kept(world: World) -> dict[str, Any]:
    """The bytes that autograd keeps of four rows in one of two ranks, but for parameters; and what a pass sends."""
    mesh, found = of_two_ranks(), {}
    for name in ("whole", "tensor", "sequence", "inputs kept"):
        module, tensors = Deep(), {}
        if name != "whole":
            divide_by_plan(module, mesh, sequence=name != "tensor", again=name != "inputs kept")
        own = {local(parameter.detach()).untyped_storage().data_ptr() for parameter in module.parameters()}

        def pack(tensor: torch.Tensor, own: Any = own, tensors: Any = tensors) -> torch.Tensor:
            storage = local(tensor.detach()).untyped_storage()
            if storage.data_ptr() not in own:
                tensors[storage.data_ptr()] = storage
            return tensor

        x = torch.ones(4, 8, 16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x)
        found[name] = sum(storage.nbytes() for storage in tensors.values())
        with Sent() as sent:
            module(x).sum().backward()
        found[f"{name}, sent"] = dict(sent.found)
    with torch.autocast("cpu", torch.bfloat16), Sent() as sent:
        module(x)
    found["autocast, gathered"] = {str(dtype): count for dtype, count in sent.gathered.items()}
    return found


def test_a_rank_keeps_half_of_what_one_process_keeps_as_the_plan_says() -> None:
    first, (found, _) = Batch((torch.ones(2, 8, 16),), torch.ones(2), None, 2, names=("x",)), in_group(2, kept)
    assert found["sequence"] == pytest.approx(found["whole"] / 2, rel=0.02)
    needs = {}
    options = {"tensor": {"tensor": 2}, "sequence": {"tensor": 2, "sequence": True}}
    options["inputs kept"] = {**options["sequence"], "recompute_allgather": False}
    for name, params in options.items():
        config = TrainConfig(task="regression", batch_size=4, strategy="mesh", strategy_params=params)
        table = plan(Recipe(module=Deep, optimizer="SGD"), config, 2, first)
        (needs[name],) = (need for need in table.needs if need.options == params)
    inputs = 4 * 8 * 16 * 4
    for name, need in needs.items():
        # The plan has the inputs of all rows, of which the rank keeps its positions besides.
        expected = found[name] + (inputs if "sequence" in need.options else 0)
        assert need.activations == pytest.approx(expected, rel=0.1), name
    # Six inputs of layers are gathered again, of which a rank sends its half; and the output, and the input's gradient.
    assert found["tensor, sent"] == {"all_reduce": 12}
    assert found["sequence, sent"] == {"all_gather": 12 + 6 + 2, "reduce_scatter": 12}
    # Of six inputs, a rank keeps the other half, too.
    assert found["inputs kept"] - found["sequence"] == 6 * inputs // 2
    assert found["inputs kept, sent"] == {"all_gather": 12 + 2, "reduce_scatter": 12}
    assert found["autocast, gathered"] == {"torch.bfloat16": 6, "torch.float32": 1}


class Own(nn.TransformerEncoderLayer):
    """A layer that may compute something else."""


LAYER = partial(nn.TransformerEncoderLayer, 8, 2, 12, batch_first=True)


def changed(**parts: Any) -> nn.Module:
    layer = LAYER()
    for name, part in parts.items():
        setattr(layer, name, part)
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Paired(), "divides torch's transformer layers, and Paired has none"),
        (nn.Sequential(Own(8, 2, 12, batch_first=True), nn.Linear(8, 8), nn.Linear(8, 8)), "and Sequential has none"),
        (Translator(), "'encoder', whose inputs have positions first: set batch_first=True"),
        (
            nn.Sequential(nn.TransformerEncoderLayer(8, 1, 12, batch_first=True)),
            "'0', for it must divide its 'self_attn', whose 1 heads are not divisible by 2",
        ),
        (
            changed(activation=partial(torch.softmax, dim=-1)),
            "'0', whose activation is not known to be elementwise",
        ),
        (
            nn.Sequential(nn.TransformerEncoderLayer(8, 2, 13, batch_first=True)),
            "for it must divide its 'linear1', whose (13, 8) weights are not divisible by 2 under 'colwise'",
        ),
        (
            changed(linear2=nn.Sequential(nn.Linear(12, 8))),
            "for it must divide its 'linear2', a torch.nn.",
        ),
    ],
)
def test_layers_that_need_whole_sequences_are_refused_before_the_job(module: nn.Module, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_module(sequence_job(type(module), {"tensor": 2}).config, Recipe(module=module), 2, module, FEW)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shard": 2}, "there are no tensor ranks"),
        ({}, "there are no tensor ranks"),
        ({"tensor": 2, "pipeline": 2}, "does not work with strategyParams.pipeline"),
        ({"tensor": 2, "plan": {"*": "colwise"}}, "does not work with strategyParams.plan"),
        ({"tensor": 2, "sequence": "yes"}, "sequence"),
        ({"tensor": 2, "sequence": False, "recompute_allgather": False}, "sequence gathers, which is not set"),
    ],
)
def test_options_that_do_not_divide_sequences_are_refused(options: dict[str, Any], says: str) -> None:
    job = sequence_job(Encoder, options)
    with pytest.raises(ConfigError, match=says):
        check_strategy(job.config, job.recipe)


def test_layers_are_not_compiled_where_sequences_are_divided() -> None:
    job = sequence_job(Encoder, {"tensor": 2}, compile=True)
    with pytest.raises(ConfigError, match="compile does not compile"):
        check_strategy(job.config, job.recipe)
