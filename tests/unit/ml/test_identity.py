"""A checkpoint knows its training by the contents of the Params, in whichever process they are made."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch import Forecaster, TorchRegressor
from sparktorch.ml.fit.identity import described
from sparktorch.ml.fit.translate import translate
from sparktorch.tasks.series.loss import SeriesStep
from sparktorch.tasks.tables.network import TableNetwork
from sparktorch.tasks.tables.preprocess import TableColumns

# A user's script, in which nothing has an import path.
SCRIPT = """
import json
from dataclasses import dataclass, field
from functools import partial
import numpy as np
import torch
from torch import nn
from sparktorch import TorchRegressor
from sparktorch.ml.fit.translate import translate

SCALE = 2.0

def scaled(x):
    return SCALE * x if {"a", "b", "c"} else x

@dataclass
class Options:
    names: set = field(default_factory=lambda: {"one", "two", "three"})

class Net(nn.Module):
    def __init__(self, options=None):
        super().__init__()
        self.options, self.itself = options, [self]
        self.layer = nn.Linear(2, 1)
        self.register_buffer("steps", torch.arange(3), persistent=False)
    def forward(self, x):
        return self.layer(x)

def made(weight):
    def loss(output, label):
        return [scaled(output - label) * part for part in weight]
    return loss

estimator = TorchRegressor(
    module=Net(Options()),
    loss=made(torch.eye(2)),
    lossParams={"array": np.ones(3), "tensor": torch.ones(2, dtype=torch.bfloat16), "set": {"x", "y", Net}},
    optimizer=partial(torch.optim.SGD, momentum=0.9),
    checkpointDir="/nowhere",
)
print(json.dumps(translate(estimator, "regression").job.checkpoint.job))
"""


def job_of(**params: Any) -> dict[str, str]:
    estimator = TorchRegressor(checkpointDir="/nowhere", **{"module": nn.Linear, **params})
    checkpoint = translate(estimator, "regression").job.checkpoint
    assert checkpoint is not None
    return dict(checkpoint.job)


def test_the_same_script_describes_the_same_training_in_every_process() -> None:
    def told(seed: str, script: str = SCRIPT) -> dict[str, str]:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    first, again = told("1"), told("2", f"# moved\n\n{SCRIPT}")
    # Nothing has set torch's seed: the script draws other weights each time, which a checkpoint has.
    assert first.pop("initialWeights") != again.pop("initialWeights")
    assert first == again


def weighing(weight: float) -> Any:
    return lambda output, label: weight * (output - label) ** 2


def reading(scale: float) -> Any:
    """Returns a function of a script that reads a global of it through another one."""
    script = f"SCALE = {scale}\ndef scaled(x): return SCALE * x\ndef loss(output, label): return scaled(output - label)"
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(script, found)
    return found["loss"]


def filled(value: float, p: float = 0.0) -> nn.Module:
    found = nn.Linear(1, 1)
    nn.init.constant_(found.weight, value)
    nn.init.zeros_(found.bias)
    return nn.Sequential(found, nn.Dropout(p))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lossParams", [{"weight": torch.tensor([1.0])}, {"weight": torch.tensor([2.0])}]),
        ("lossParams", [{"weight": torch.zeros(2)}, {"weight": torch.zeros(2, dtype=torch.int32)}]),
        ("lossParams", [{"weight": np.zeros((2, 1))}, {"weight": np.zeros((1, 2))}]),
        ("loss", [partial(nn.functional.huber_loss, delta=1.0), partial(nn.functional.huber_loss, delta=2.0)]),
        ("loss", [weighing(1.0), weighing(2.0)]),
        ("loss", [reading(1.0), reading(2.0)]),
        ("loss", [lambda o, t: o - t, lambda o, t: o + t]),
        ("loss", [lambda o, t, k=1: k * o, lambda o, t, k=2: k * o]),
        ("loss", [filled(1.0), filled(2.0)]),
        ("module", [filled(1.0, p=0.1), filled(1.0, p=0.2)]),
        ("module", [nn.LSTM, torch.ao.nn.quantizable.LSTM]),
    ],
)
def test_values_that_differ_describe_another_training(name: str, values: list[Any]) -> None:
    first, second = (job_of(**{name: value}) for value in values)
    assert {key for key in first if first[key] != second[key]} == {name}


def test_what_stops_early_is_left_out_at_its_defaults_which_earlier_checkpoints_lack() -> None:
    changed = {"earlyStoppingMetric": "val_mae", "earlyStoppingMode": "min", "earlyStoppingMinDelta": 0.5}
    made: dict[str, Any] = {"metrics": {"mae": "MeanAbsoluteError"}, "validationIndicatorCol": "held_out"}
    plain, other = job_of(**made), job_of(**made, **changed)
    assert not changed.keys() & plain.keys()
    assert other == plain | {name: repr(value) for name, value in changed.items()}


def test_secrets_are_a_digest_in_what_a_training_is_known_by() -> None:
    def text(secret: str) -> str:
        params = {"hf_token": secret, "store": [f"postgres://me:{secret}@host/db"], "width": 3}
        return job_of(moduleParams=params)["moduleParams"]

    first = text("s3cret-of-mine")
    assert "s3cret-of-mine" not in first
    assert "width: 3" in first
    assert first == text("s3cret-of-mine") != text("s3cret-of-yours")


def test_checkpoints_know_the_classes_of_tasks_by_their_first_names() -> None:
    values = {
        "module": TableNetwork,
        "preprocess": TableColumns({"a": ["x"]}),
        "moduleParams": {"module": "sparktorch.tasks.series.network:SeriesNetwork"},
        "trainingStep": SeriesStep("L1Loss", {}, "window", 1.0),
    }
    assert described(values) == {
        "module": "TableNetwork (module sparktorch.data.tables)",
        "preprocess": "TableColumns (sha256 be4993651a7b3d49)",
        "moduleParams": "{module: 'sparktorch.model.series.module:SeriesNetwork'}",
        "trainingStep": "SeriesStep (sha256 c00528d6d473d9c0)",
    }
    windows = {"orderCol": "t", "labelCol": "y", "context": 4, "horizon": 2, "futureCols": ["p"]}
    job = translate(Forecaster(**windows, checkpointDir="/checkpoints"), "generic").job
    assert job.checkpoint is not None
    assert job.checkpoint.job["window"] == "Window(context=4, horizon=2, step=1, known=(1,), even=None)"
    assert job.checkpoint.job["moduleParams"].startswith("{module: 'sparktorch.model.series.module:SeriesNetwork'")
