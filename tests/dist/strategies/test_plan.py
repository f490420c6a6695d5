"""What the plan says a worker keeps is what the ranks of each strategy keep."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.errors import ConfigError
from sparktorch.train.checkpoint.tensors import own_optimizer
from sparktorch.train.plan.memory import plan
from sparktorch.train.plan.table import Need
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.dtensor import local
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.registry import build_strategy
from tests.support.attention_nets import Encoder
from tests.support.nets import Paired, Tower
from tests.support.ranks import in_group
from tests.support.strategies import PARTED

RANKS = 4
FEW = Batch((torch.ones(2, 5),), torch.ones(2), None, 2, names=("x",))
WIDE = Batch((torch.ones(2, 100),), torch.ones(2, 1), None, 2, names=("x",))


def kept(world: World, recipe: Recipe, strategy: str, options: dict[str, Any]) -> dict[str, int]:
    """The bytes that a rank keeps after a step."""
    config = TrainConfig(strategy=strategy, strategy_params=options)
    shared = build_strategy(config, world)
    plain = recipe.build_module(0)
    rows, staged = Batch((torch.ones(2, 5),), None, None, 2), options.get("pipeline", 1) > 1
    module = shared.prepare(plain, Start(example=lambda: rows))
    optimizer = shared.optimizer(recipe, plain)
    if staged:
        shared.run_pass(module, rows, lambda module, batch: (module(*batch.inputs).sum(), {}), 1.0, nullcontext())
    else:
        module(*rows.inputs).sum().backward()
    optimizer.step()
    state = own_optimizer(optimizer).state.values()
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    if not staged:  # whose schedule reduces whole ones at its end
        gradients = list(map(local, gradients))
    return {
        "parameters": sum(local(p).nbytes for p in plain.parameters()) + sum(b.nbytes for b in plain.buffers()),
        "gradients": sum(4 * gradient.numel() for gradient in gradients),
        "state": sum(local(t).nbytes for s in state for t in s.values() if isinstance(t, torch.Tensor) and t.dim()),
    }


CASES: list[tuple[type[nn.Module], str, dict[str, Any]]] = [
    (Tower, "ddp", {}),
    (Tower, "zero1", {}),
    (Tower, "zero3", PARTED),
    (Tower, "mesh", {"shard": 2, **PARTED}),
    (Paired, "mesh", {"tensor": 2}),
    (Paired, "mesh", {"pipeline": 2, "shard": 2}),
    (Paired, "mesh", {"pipeline": 4}),
    (Encoder, "mesh", {"tensor": 2, "shard": 2}),
]


def recipe_of(module: type[nn.Module]) -> Recipe:
    return Recipe(module=module, optimizer="Adagrad")  # one number of state for each, and a step


def kept_of_all(world: World) -> list[dict[str, int]]:
    return [kept(world, recipe_of(module), strategy, options) for module, strategy, options in CASES]


@pytest.fixture(scope="module")
def kept_by_ranks() -> list[list[dict[str, int]]]:
    """What each rank keeps in each case."""
    return in_group(RANKS, kept_of_all)


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join([m.__name__, s, *o]) for m, s, o in CASES])
def test_a_worker_keeps_what_the_plan_says(case: int, kept_by_ranks: list[list[dict[str, int]]]) -> None:
    module, strategy, options = CASES[case]
    recipe = recipe_of(module)
    config = TrainConfig(task="regression", batch_size=64, strategy=strategy, strategy_params=options)
    (need,) = (
        need for need in plan(recipe, config, RANKS, FEW).needs if (need.strategy, need.options) == (strategy, options)
    )
    found = [rank[case] for rank in kept_by_ranks]
    steps = 4 * len(list(module().parameters()))  # the optimizer's counters of steps, which are no parameter's size
    for name in ("parameters", "gradients", "state"):
        expected = max(rank[name] for rank in found)
        assert expected <= getattr(need, name) <= expected + (steps if name == "state" else 0)


def test_activations_are_those_that_autograd_keeps_of_the_rows_of_a_worker() -> None:
    recipe = Recipe(module=nn.Sequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 1)), optimizer="SGD")
    config = TrainConfig(task="regression", batch_size=64, accumulation_steps=2)
    found = {(need.strategy, *need.options.items()): need for need in plan(recipe, config, 2, WIDE).needs}
    inputs, hidden, error = 4 * 101, 4 * 50, 4 * 1  # the output less the label is kept by the loss
    assert found["ddp",].activations == 16 * (inputs + hidden + error)
    assert found["mesh", ("tensor", 2)].activations == 16 * (2 * inputs + hidden + 2 * error)
    assert found["ddp",].state == 0
    assert found["ddp",].sent == found["ddp",].gradients == 4 * 5101
    # Parameters are gathered in each of two passes; half of what ddp sends comes on top.
    assert found["zero2",].sent == found["zero3",].sent == 4 * 5101 * 3 // 2
    # Under zero3, those of units are gathered again backward: of the first layer.
    assert of_zero3(recipe, WIDE, replace(config, accumulation_steps=2), min_parameters=5000).sent == (
        4 * (5101 * 3 + 5050 * 2) // 2
    )
    # Whole gradients are kept until the second pass has reduced them.
    assert found["zero3",].gradients == 4 * 5101
    # Inputs are exchanged, and forward the output of the second layer is summed up; the input needs no gradient.
    assert found["mesh", ("tensor", 2)].sent == 64 * (inputs // 2 + 4 * 1)
    # Of eight micro-batches, a worker has two. The first layer's output is passed on, and its gradient.
    staged = found["mesh", ("pipeline", 2)]
    assert staged.activations == 16 * ((hidden + error) // 4 + 2 * inputs)
    assert staged.sent == 64 * (inputs // 2 + 2 * hidden)
    assert staged.gathered == 0


def of_zero3(recipe: Recipe, first: Batch, config: TrainConfig, **options: Any) -> Need:
    config = replace(config, strategy="zero3", strategy_params=options)
    (found,) = [
        each for each in plan(recipe, config, 2, first).needs if each.options == options and each.strategy == "zero3"
    ]
    return found


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + cast(torch.Tensor, self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(100, 64), *(Block(64) for _ in range(6)), nn.Linear(64, 1))


def activations_in(tracker: MemTracker, moment: str) -> tuple[int, int]:
    """Bytes of activations, and of what is there in backward for a time."""
    sizes = {str(kind): size for kind, size in tracker.get_tracker_snapshot(moment)[torch.device("cpu")].items()}
    return sizes["_MemRefType.ACT"], sizes["_MemRefType.TEMP"]


@pytest.mark.parametrize(
    ("classes", "precision"),
    [([], "fp32"), (["Block"], "fp32"), (["Block"], "bf16")],
    ids=["kept", "computed again", "bf16"],
)
def test_activations_are_as_many_as_torch_finds_at_the_peak_of_a_step(
    classes: list[str], precision: Literal["fp32", "bf16"]
) -> None:
    rows, module, recipe = 256, Blocks(), Recipe(module=Blocks, optimizer="SGD")
    apply_activation_checkpointing(module, check_fn=lambda part: type(part).__name__ in classes)
    tracker = MemTracker()
    tracker.track_external(module)
    features, label = torch.ones(rows, 100), torch.ones(rows, 1)
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            scores = module(features)
            forward, _ = activations_in(tracker, "current")  # with weights as autocast has them
            loss = ((scores - label) ** 2).sum()
        loss.backward()
    found = max(forward, sum(activations_in(tracker, "peak")))
    config = TrainConfig(task="regression", batch_size=2 * rows, precision=precision)
    need = of_zero3(recipe, WIDE, config, wrap_classes=classes, activation_checkpointing=bool(classes))
    assert need.activations - features.nbytes - label.nbytes == pytest.approx(found, rel=0.1)


def test_inputs_of_parts_that_keep_nothing_are_not_kept() -> None:
    recipe = Recipe(module=Blocks, optimizer="SGD", freeze=("*", "!7.*"))
    config = TrainConfig(task="regression", batch_size=512)
    plain, again = (
        of_zero3(recipe, WIDE, config, wrap_classes=["Block"], activation_checkpointing=each) for each in (False, True)
    )
    assert again.activations == plain.activations


def test_what_is_offloaded_takes_no_memory_of_the_device() -> None:
    config, recipe = TrainConfig(task="regression", batch_size=64), Recipe(module=Blocks, optimizer="AdamW")
    kept = of_zero3(recipe, WIDE, config, wrap_classes=["Block"])
    config = replace(config, strategy="zero3", strategy_params={"wrap_classes": ["Block"], "cpu_offload": True})
    table = plan(recipe, config, 2, WIDE, memory=kept.total - 1)
    (offloaded,) = [need for need in table.needs if "cpu_offload" in need.options]
    assert offloaded.on_host == kept.parameters + kept.gradients + kept.state
    assert offloaded.total == kept.gathered + kept.activations
    assert "fits, 1.6 MB in the host's memory" in str(table)
    assert "too large, " not in str(table)


def test_averages_and_weights_as_autocast_has_them_are_counted_and_narrow_parameters_are_gathered_as_such() -> None:
    recipe = Recipe(module=nn.Sequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 1)), optimizer="SGD")
    config = TrainConfig(task="regression", batch_size=64)
    plain, averaged = (of_zero3(recipe, WIDE, each) for each in (config, replace(config, ema_decay=0.9)))
    assert averaged.state - plain.state == plain.parameters
    last = of_zero3(replace(recipe, freeze=("0.*",)), WIDE, replace(config, ema_decay=0.9))
    assert last.state == last.gradients < last.parameters
    cast = of_zero3(recipe, WIDE, replace(config, precision="bf16"))
    layers = 32 * (2 * 50 + 2 * 50 + 4 * 101 + 4 * 1)
    assert layers < cast.activations < layers + 32 * 500
    narrow = of_zero3(recipe, WIDE, config, param_dtype="bf16")
    assert narrow.gathered == plain.gathered // 2
    assert narrow.sent == plain.sent // 2


def test_a_plan_of_sparse_inputs_is_refused() -> None:
    first = Batch((torch.eye(2).to_sparse(),), torch.ones(2), None, 2, names=("x",))
    with pytest.raises(ConfigError, match=r"input 'x' is sparse or jagged, and a plan is made of rows"):
        plan(Recipe(module=nn.Linear(2, 1)), TrainConfig(task="regression"), 2, first)


def test_the_table_names_what_fits_and_what_is_refused() -> None:
    config = TrainConfig(task="regression", batch_size=64, channels_last=True)
    table = plan(Recipe(module=Paired), config, 4, FEW, memory=6000)
    text = str(table)
    assert repr(table) == text  # which notebooks show
    assert "4 workers, 16 rows of each at a time" in text
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["ddp"].endswith("too large")
    assert lines["zero1"].endswith("fits")
    assert "channelsLast lays out weights" in lines["zero3"]
    assert [need.strategy for need in table.fitting] == ["zero1"]


def test_a_pipeline_whose_workers_write_the_model_is_planned() -> None:
    config = TrainConfig(task="regression", batch_size=64, model_folder="/models/new")
    needs = plan(Recipe(module=Paired), config, 2, FEW).needs
    (staged,) = (need for need in needs if "pipeline" in need.options)
    assert not staged.refused
    assert [need.strategy for need in needs if "modelDir is set" in need.refused] == ["ddp", "zero1"]


def test_a_model_that_no_process_could_build_is_planned() -> None:
    width = 1 << 20
    first = Batch((torch.ones(2, width),), torch.ones(2, width), None, 2, names=("x",))
    module = partial(nn.Linear, width, width, bias=False)
    table = plan(Recipe(module=module), TrainConfig(task="regression"), 4, first, memory=10**15)
    assert table.parameters == width**2
    assert table.needs[0].total > 16 * 10**12  # of Adam


class Looks(nn.Linear):
    """Asks for the value of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.max() < 100 else x / 100)


def test_a_module_that_needs_values_is_planned_with_values() -> None:
    first = Batch((torch.ones(2, 5),), torch.ones(2, 1), None, 2, names=("x",))
    table = plan(Recipe(module=partial(Looks, 5, 1)), TrainConfig(task="regression"), 2, first)
    assert (table.parameters, table.needs[0].gradients) == (6, 24)
