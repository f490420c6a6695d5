"""What the simulated accelerator catches, so that a green ring means something."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch import Callback
from sparktorch.base.world import World
from sparktorch.errors import RankError
from sparktorch.train.callbacks import FitContext
from tests.device.jobs import DEVICE, job_of, trained, waits_in_steps
from tests.device.kinds import Net
from tests.support.ranks import in_group

pytestmark = pytest.mark.skipif(DEVICE != "sim", reason="the ring runs on a real device")

LAYERS: dict[str, tuple[nn.Module, ...]] = {
    "MLP": (nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 4)),
    "CNN": (nn.Unflatten(2, (8, 8)), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4)),
    "transformer": (nn.TransformerEncoderLayer(64, 4, 32, batch_first=True), nn.Flatten(), nn.Linear(192, 4)),
}


class Misplaced(Net):
    """Adds a tensor that it makes on the CPU."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(*inputs) + torch.ones(len(inputs[0]))


class Reads(Callback):
    """Reads a parameter after each step."""

    ranks = "all"

    def on_step_end(self, context: FitContext) -> None:
        next(context.module.parameters()).sum().item()


def test_a_tensor_on_the_wrong_device_ends_the_fit() -> None:
    with pytest.raises(RankError, match="Expected all tensors to be on the same device"):
        trained(job_of(recipe={"module": Misplaced}))


def test_a_step_that_reads_from_the_device_is_noticed() -> None:
    job = job_of(recipe={"callbacks": (Reads(),)})
    _, metas = trained(job)
    waits = waits_in_steps(metas)
    assert len(waits) == 2 * metas[0]["steps_per_epoch"]
    assert all("test_simulated.py: next(context.module.parameters()).sum().item() < on_step_end" in w for w in waits)


def _steps(world: World, layers: tuple[nn.Module, ...]) -> tuple[list[float], list[float], list[str]]:
    """Trains a few steps on the CPU and on the device; returns the losses of both, and what the device waited for."""
    from tests.support import simulated

    torch.manual_seed(1)
    x, y = torch.randn(8, 3, 64), torch.randint(4, (8,))

    def losses(device: str) -> list[Any]:
        model, inputs, labels = nn.Sequential(*copy.deepcopy(layers)).to(device), x.to(device), y.to(device)
        optimizer, found = torch.optim.AdamW(model.parameters(), 0.01), []
        torch.manual_seed(0)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            for _ in range(3):
                found.append(nn.functional.cross_entropy(model(inputs), labels))
                optimizer.zero_grad()
                found[-1].backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return found

    on_cpu = losses("cpu")
    with simulated.synchronisations() as waits:
        on_device = losses("sim")
    moved = [wait for wait in waits if "host to device" not in wait]  # the model and its inputs, before the steps
    return [loss.item() for loss in on_cpu], [loss.item() for loss in on_device], moved


@pytest.mark.parametrize("layers", LAYERS)
def test_a_plain_loop_ends_with_the_losses_of_the_cpu_and_waits_for_nothing(layers: str) -> None:
    ((expected, found, waits),) = in_group(1, _steps, LAYERS[layers], device="sim")
    assert (found, waits) == (expected, [])


def _mistakes(world: World) -> list[str]:
    """Returns what torch says of code that CUDA would refuse."""
    x, there = torch.randn(8, 64), torch.ones(8, dtype=torch.int64, device="sim:1")
    here, linear = x.to("sim:0"), nn.Linear(64, 4)
    mistakes: list[Callable[[], Any]] = [
        lambda: x[there],
        lambda: linear(here),
        lambda: nn.functional.cross_entropy(here, there),
        lambda: here.numpy(),
        lambda: torch.randn(3, device="sim", generator=torch.Generator()),
        lambda: torch.ones(1, device="sim:2"),
        lambda: torch.empty(9 << 30, dtype=torch.uint8, device="sim:0"),
    ]
    return [_said(mistake) for mistake in mistakes]


def _said(mistake: Callable[[], Any]) -> str:
    try:
        return f"not caught: {mistake()}"
    except (RuntimeError, TypeError) as error:
        return str(error)


def test_what_cuda_refuses_is_refused() -> None:
    (found,) = in_group(1, _mistakes, device="sim")
    assert not [text for text in found if text.startswith("not caught")]
    assert "out of memory" in found[-1]
