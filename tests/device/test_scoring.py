"""A scorer on a device gives what one on the CPU gives, for every kind of column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparktorch.base.state_dict import pack_state
from sparktorch.base.world import World
from sparktorch.model.scorer import Scorer
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.recipe.dry_run import OutputSpec
from tests.device.jobs import DEVICE
from tests.device.kinds import KINDS, Net
from tests.support.ranks import in_group


def _scored(world: World, kind: str) -> list[Any]:
    torch.manual_seed(2)
    columns = KINDS[kind].columns(validated=False, weighted=False)
    preprocess = columns.preprocess
    trained = TrainedModule(
        source=Net,
        params={"kind": kind},
        weights=pack_state(Net(kind).state_dict()),
        inputs=columns.inputs,
        preprocess=None if preprocess is None else preprocess.function,
        returned=None if preprocess is None else preprocess.arguments,
        outputs=(OutputSpec("", ()),),
        task="regression",
    )
    batch = KINDS[kind].parts(1)[0][0]
    inputs = [batch.column(spec.name) for spec in columns.inputs]
    Net.seen.clear()
    found = [
        Scorer(trained, device=device, batch_size=16).score(inputs)["prediction"] for device in ("cpu", world.device)
    ]
    assert Net.seen == {"cpu", world.device}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_it_scores_what_the_cpu_scores(kind: str) -> None:
    ((expected, found),) = in_group(1, _scored, kind, device=DEVICE)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert len(found) == len(KINDS[kind].arrays[0])


class Wide(Net):
    """Needs a megabyte a row."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(*inputs) + self.layers[2].bias.expand(len(inputs[0]), 1 << 18).sin().mean(1)


def _scored_in_little(world: World) -> list[Any]:
    from tests.support import simulated

    simulated.MEMORY = 10 << 20
    columns = KINDS["padded"].columns(validated=False, weighted=False)
    trained = TrainedModule(
        source=Wide,
        params={"kind": "padded"},
        weights=pack_state(Wide("padded").state_dict()),
        inputs=columns.inputs,
        outputs=(OutputSpec("", ()),),
        task="regression",
    )
    inputs = [KINDS["padded"].parts(1)[0][0].column(spec.name) for spec in columns.inputs]
    return [Scorer(trained, device=device, batch_size="auto").score(inputs)["prediction"] for device in ("cpu", "sim")]


@pytest.mark.skipif(DEVICE != "sim", reason="the memory of a real device cannot be limited")
def test_rows_that_do_not_fit_are_scored_in_smaller_batches() -> None:
    ((expected, found),) = in_group(1, _scored_in_little, device=DEVICE)
    np.testing.assert_allclose(found, expected, atol=1e-6)
