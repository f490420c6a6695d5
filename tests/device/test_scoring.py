"""A scorer on a device gives what one on the CPU gives, for every kind of column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch.base.state_dict import pack_state
from sparktorch.base.world import World
from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.tensors import to_arrow
from sparktorch.model.export import export_program
from sparktorch.model.scorer import Scorer, Scoring
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.recipe.dry_run import OutputSpec
from tests.device.jobs import DEVICE
from tests.device.kinds import KINDS, Net
from tests.support.ranks import in_group


def _predicted(kind: str, device: str, batch_size: int | str, net: type[Net] = Net) -> Any:
    torch.manual_seed(2)
    columns = KINDS[kind].columns(validated=False, weighted=False)
    preprocess = columns.preprocess
    trained = TrainedModule(
        source=net,
        params={"kind": kind},
        weights=pack_state(net(kind).state_dict()),
        inputs=columns.inputs,
        preprocess=None if preprocess is None else preprocess.function,
        returned=None if preprocess is None else preprocess.arguments,
        outputs=(OutputSpec("", ()),),
        task="regression",
    )
    batch = KINDS[kind].parts(1)[0][0]
    Net.seen.clear()
    found = Scorer(trained, Scoring(batch_size=batch_size), device=device).score(
        [batch[spec.name] for spec in columns.inputs]
    )
    assert Net.seen == {device}
    return found["prediction"]


def _scored(world: World) -> dict[str, Any]:
    return {kind: [_predicted(kind, device, 16) for device in ("cpu", world.device)] for kind in KINDS}


def test_it_scores_what_the_cpu_scores() -> None:
    (scored,) = in_group(1, _scored, device=DEVICE)
    for kind, (expected, found) in scored.items():
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=kind)
        assert len(found) == len(KINDS[kind].arrays[0])


class Recurrent(nn.Module):
    """Makes tensors on the device of its input, as LSTM does too, and has one that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.shift = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(x.shape[1], device=x.device)
        states, _ = self.lstm(x * steps[:, None])
        return (states[:, -1] + self.shift).sum(1)


def _scored_by_its_graph(world: World) -> list[Any]:
    torch.manual_seed(2)
    module = Recurrent().eval()
    spec = TensorSpec(name="x0", column="x", dtype="float32", shape=(5, 3))
    trained = TrainedModule(
        source=export_program(module, [spec]),
        params={},
        weights=pack_state(module.state_dict()),
        inputs=(spec,),
        outputs=(OutputSpec("", ()),),
        task="regression",
    )
    rows = np.random.default_rng(0).normal(size=(7, 5, 3)).astype(np.float32)
    scored = [Scorer(trained, device=device).score([to_arrow(rows)])["prediction"] for device in ("cpu", world.device)]
    built = trained.build().to(world.device)
    there = built(torch.from_numpy(rows).to(world.device)).detach()
    assert there.device.type == world.device.partition(":")[0]
    back = built.cpu()(torch.from_numpy(rows)).detach()
    return [module(torch.from_numpy(rows)).detach().numpy(), *scored, there.cpu().numpy(), back.numpy()]


def test_a_model_that_was_saved_as_a_graph_scores_on_a_device_what_the_cpu_scores() -> None:
    ((expected, *scored),) = in_group(1, _scored_by_its_graph, device=DEVICE)
    for found in scored:
        np.testing.assert_allclose(found, expected, atol=1e-5)


class Wide(Net):
    """Needs a megabyte a row."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(*inputs) + self.layers[2].bias.expand(len(inputs[0]), 1 << 18).sin().mean(1)


def _scored_in_little(world: World) -> list[Any]:
    from tests.support import simulated

    simulated.MEMORY = 10 << 20
    return [_predicted("padded", device, "auto", Wide) for device in ("cpu", world.device)]


@pytest.mark.skipif(DEVICE != "sim", reason="the memory of a real device cannot be limited")
def test_rows_that_do_not_fit_are_scored_in_smaller_batches() -> None:
    ((expected, found),) = in_group(1, _scored_in_little, device=DEVICE)
    np.testing.assert_allclose(found, expected, atol=1e-6)
