"""Stages one after another compute what their module does, wherever it is cut: outputs, gradients, and no others."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.base.deferred import deferred
from sparktorch.errors import ModuleError, SparkTorchError
from sparktorch.train.pipeline.kept import attributes
from sparktorch.train.pipeline.pipe import Pipe
from sparktorch.train.pipeline.programs import Stage, programs
from sparktorch.train.pipeline.recording import Twin
from sparktorch.train.pipeline.setup import check_each_row, leave, staged
from sparktorch.train.pipeline.stages import cut, layers_of
from sparktorch.train.pipeline.step import check_step
from tests.support.nets import Chain, Paired
from tests.support.staged_nets import (
    Adding,
    Attending,
    Clamping,
    Detouring,
    Doubling,
    Filling,
    Keeping,
    Sharing,
    Shifting,
    Ticking,
    Winding,
    in_place,
    normed,
)

Module = Callable[[], nn.Module]


def stages_of(module: nn.Module, split: list[str], x: torch.Tensor) -> list[Stage]:
    """The stages of a module that begins its second and later ones with these layers, in one process."""
    count = len(split) + 1
    twin = Twin(module, torch.device("cpu"))
    layers = layers_of(twin.module, count, split)
    recording = twin.record(layers, lambda whole, value: whole(value), [x], training=True)
    placed = cut(recording, twin.module, count, split)
    stages = [Stage(module, [name for name, own in placed.items() if own == stage]) for stage in range(count)]
    for stage, program in zip(stages, programs(recording, placed, count), strict=True):
        stage.program = program
    return stages


def backward(outputs: list[torch.Tensor]) -> None:
    sum(output.square().sum() for output in outputs if output.requires_grad).backward()  # type: ignore[union-attr]


def pass_through(stages: list[Stage], x: torch.Tensor) -> list[torch.Tensor]:
    """Runs forward and backward as a schedule does: what crosses is cut off, and its gradient sent back.

    A schedule receives into the same tensors each time, and cuts its inputs into micro-batches.
    """
    before = x.clone()
    sent: list[tuple[torch.Tensor, ...]] = []
    received: list[list[torch.Tensor]] = [[]]
    for stage in stages:
        sent.append(stage(*received[-1], input_0=x))
        received.append([value.detach().requires_grad_(value.requires_grad) for value in sent[-1]])
    assert torch.equal(x, before)
    for values, copies in zip(sent, received[1:], strict=True):
        assert [value.requires_grad for value in values] == [copy.requires_grad for copy in copies]
        assert all(torch.equal(value, copy) for value, copy in zip(values, copies, strict=True))
    backward(list(sent[-1]))
    for values, copies in zip(sent[-2::-1], received[-2:0:-1], strict=True):
        pairs = [(value, copy.grad) for value, copy in zip(values, copies, strict=True) if value.requires_grad]
        assert all(gradient is not None for _, gradient in pairs)
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
    return list(sent[-1])


def cuts_of(make: Module) -> list[list[str]]:
    """One cut before each layer but the first, and two cuts."""
    module = make()
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)][1:]
    return [[name] for name in names] + [[names[0], names[-1]]]


class Again(nn.Module):
    """Calls a layer several times."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.last, self.head = (nn.Linear(*shape) for shape in ((5, 8), (8, 8), (8, 8), (8, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for _ in range(4):
            x = torch.tanh(self.again(x))
        found: torch.Tensor = self.head(torch.tanh(self.last(x))).squeeze(-1)
        return found


def test_a_layer_that_is_called_again_is_cut_around() -> None:
    for count in (2, 3):
        twin = Twin(Again(), torch.device("cpu"))
        layers = layers_of(twin.module, count)
        recording = twin.record(layers, lambda whole, value: whole(value), [torch.ones(2, 5)], training=True)
        placed = cut(recording, twin.module, count)
        assert set(placed.values()) == set(range(count))


def test_a_module_without_values_is_cut_like_one_with_them() -> None:
    rows = Batch((torch.ones(2, 5),), None, None, 2)
    expected, built = staged(Keeping(), 2, [], rows), deferred(Keeping)
    with torch.device("meta"):  # as in a dry run
        given = Batch((torch.ones(2, 5),), None, None, 2)
    for each in (staged(built.module, 2, [], rows), staged(built.module, 2, [], given)):
        assert (each.stage_of, each.read) == (expected.stage_of, expected.read)
    assert all(parameter.is_meta for parameter in built.module.parameters())
    twin = Twin(built.module, torch.device("cuda"))  # where a rank computes, not where its module was built
    assert {tensor.device.type for tensor in twin.module.state_dict().values()} == {"cuda"}


CHANGING = [Ticking, Shifting, Adding, Detouring, Filling, Clamping]


@pytest.mark.parametrize(
    "make", [Chain, Paired, Doubling, Winding, Attending, Sharing, Keeping, in_place, normed, *CHANGING]
)
def test_stages_compute_what_the_module_does_wherever_it_is_cut(make: Module) -> None:
    tried = 0
    for split in cuts_of(make):
        torch.manual_seed(0)
        whole, x = make(), torch.randn(6, 5)
        torch.manual_seed(0)
        parted = make()
        try:
            stages = stages_of(parted, split, x)
        except SparkTorchError:
            continue  # it cannot be cut there: a parameter is in several stages, or nothing to train in one
        tried += 1
        expected = [value for value in pytree.tree_leaves(whole(x.clone())) if isinstance(value, torch.Tensor)]
        backward(expected)
        found = pass_through(stages, x)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
        for name, parameter in parted.named_parameters():
            assert (parameter.grad is None) == (gradients[name] is None), (split, name)
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-3, rtol=1e-2)
    assert tried if make not in CHANGING else tried == len(cuts_of(make))


_steps: dict[int, torch.Tensor] = {}


@functools.cache
def steps_of(count: int) -> torch.Tensor:
    return torch.arange(count).float()


def kept_steps_of(count: int) -> torch.Tensor:
    return _steps.setdefault(count, torch.arange(count).float())


class Stepping(nn.Linear):
    """Adds numbers from outside the module."""

    def __init__(self, numbers: Callable[[int], torch.Tensor]) -> None:
        super().__init__(5, 5)
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.numbers(5)


@pytest.fixture
def no_steps() -> Any:
    yield
    _steps.clear()
    steps_of.cache_clear()
    gc.unfreeze()


@pytest.mark.usefixtures("no_steps")
def test_what_a_recording_leaves_in_caches_has_no_layer() -> None:
    x = torch.randn(6, 5)
    for numbers in (steps_of, kept_steps_of):
        module = nn.Sequential(nn.Linear(5, 5), Stepping(numbers), nn.Linear(5, 1))
        stages_of(module, ["1"], x)
        gc.freeze()  # as a worker does before its second training
        stages = stages_of(module, ["1"], x)
        if numbers is steps_of:
            (found,) = pass_through(stages, x)
            assert torch.equal(found, module(x))
        else:
            with pytest.raises(ModuleError, match="layer '1' computes with a tensor without values"), torch.no_grad():
                stages[1](x, input_0=x)


class Placing(nn.Module):
    """Adds a frozen parameter between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(5, 5), nn.Linear(5, 1)
        self.place = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.enter(x) + self.place)
        return found


def test_a_parameter_between_layers_that_begins_to_train_is_refused() -> None:
    module, x = Placing(), torch.ones(2, 5)
    stages = stages_of(module, ["out"], x)
    pass_through(stages, x)
    module.place.requires_grad_()
    with pytest.raises(ModuleError, match="parameter 'place' requires gradients, and did not when"):
        pass_through(stages, x)


def test_a_layer_that_begins_to_have_gradients_is_refused() -> None:
    module = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 5), nn.Linear(5, 1))
    stages, x = stages_of(module, ["2"], torch.ones(2, 5)), torch.ones(2, 5)
    pass_through(stages, x)
    module[0].requires_grad_()
    with pytest.raises(ModuleError, match="what layer '0' returns requires gradients, and did not when"):
        pass_through(stages, x)
    with torch.no_grad():
        stages[0](input_0=x)


class Placed(nn.Linear):
    """Says where it is and of which dtype, as models of transformers do, and returns nothing besides its scores."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x[:, :0]


def test_what_training_steps_and_outputs_may_have_is_not_refused() -> None:
    module, batch = Placed(5, 1), Batch((torch.ones(2, 5),), None, None, 2)

    def step(module: nn.Module, batch: Batch) -> torch.Tensor:
        scores, nothing = module(batch.inputs[0].to(module.device, module.dtype))
        loss: torch.Tensor = scores.mean() + nothing.sum()
        return loss

    check_step(step, module, batch)
    check_each_row(module, batch)


class Halving(nn.Linear):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return super().forward(x).squeeze(-1)


def test_a_module_that_changes_its_input_in_place_is_checked_with_the_values_that_it_gets() -> None:
    module, batch = Halving(5, 1), Batch((torch.ones(2, 5),), torch.ones(2), None, 2)

    def step(module: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = module(batch.inputs[0] * 2).mean()
        return loss

    check_step(step, module, batch)
    check_each_row(module, batch)
    assert torch.equal(batch.inputs[0], torch.ones(2, 5))


class Optioned(Chain):
    """Computes with numbers in a dict, some of them beside a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"scale": 1.0, "steps": [1, (torch.ones(1), 1)]}
        self.options |= {"all": self.options, "words": {str(number): number for number in range(2000)}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number, (_, power) = self.options["steps"]
        return super().forward(x) * (self.options["scale"] * number) ** power


def test_numbers_in_lists_and_dicts_of_a_module_are_those_of_its_recording() -> None:
    module = Optioned()
    twin = Twin(module, torch.device("cpu"))
    tensor = twin.module.options["steps"][1][0]  # type: ignore[index]
    before = attributes(module, [])
    for change in ({"scale": 3.0}, {"new": {"a": (1, "b")}}, {"steps": [2, (torch.ones(1), 2)]}):
        module.options |= change
        twin.record(
            layers_of(twin.module, 2),
            lambda whole, x: whole(x),
            [torch.ones(2, 5)],
            training=True,
            attributes_of=module,
        )
        now = attributes(module, [])
        assert len(now) < 100
        assert (now != before, attributes(twin.module, [])) == (True, now)
        before = now
    assert twin.module.options["steps"][1][0] is tensor  # type: ignore[index]


def test_a_stage_holds_nothing_of_the_layers_of_others() -> None:
    module = nn.ModuleDict({"own": nn.LSTM(2, 3), "other": nn.LSTM(3, 4)})
    own, other = (weakref.WeakSet(module[name].parameters()) for name in ("own", "other"))
    leave(module, ["own"], ["other"], [])
    assert (len(own), len(other)) == (4, 0)


class Scaled(nn.Linear):
    """Has a buffer."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.register_buffer("factor", torch.ones(()))


class Framed(nn.Module):
    """Has a buffer besides those of its blocks' parts."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(()))
        self.blocks = nn.Sequential(*(nn.Sequential(Scaled(), nn.Linear(5, 5)) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks(x + self.shift)
        return found


def test_buffers_of_parts_whose_activations_are_computed_again_are_those_of_their_stage() -> None:
    module = Framed()
    found = staged(module, 2, ["blocks.1"], Batch((torch.ones(2, 5),), None, None, 2))
    apply_activation_checkpointing(module, check_fn=lambda part: isinstance(part, Scaled))
    alone: Any = None  # no process group
    pipe = Pipe(
        *(module, [], found.twin, found.layers, found.stage_of, alone, torch.device("cpu")),
        schedule="1f1b",
        micro_batches=1,
    )
    assert [id(buffer) for buffer in pipe.common_buffers] == [id(module.shift)]
