"""The page of the site that says what goes with which strategy: each pair is put to the checks of a fit."""

from __future__ import annotations

import re
from typing import Any

from pytorch_lightning import LightningModule
from torch import nn

from sparktorch import TorchClassifier
from sparktorch.errors import SparkTorchError
from sparktorch.ml.fit.translate import translate
from sparktorch.train.strategies.registry import STRATEGIES

WORKERS = 4
OPTIONS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "mesh": [("shard", {"shard": 2}), ("tensor", {"tensor": 2}), ("pipeline", {"pipeline": 2})],
    "parameterServer": [("", {}), ("in step", {"staleness": 0})],
}
FEATURES: dict[str, dict[str, Any]] = {
    "checkpoints: `checkpointDir`": {"checkpointDir": "/runs/1"},
    "fewer workers: `minWorkers`": {"minWorkers": 2, "maxRestarts": 1},
    "`accumulationSteps`, `microBatchSize`": {"accumulationSteps": 2},
    '`microBatchSize="auto"`': {"microBatchSize": "auto"},
    '`precision="bf16"`': {"precision": "bf16"},
    '`precision="fp16"`': {"precision": "fp16"},
    "`gradientClipNorm`, `gradientClipValue`": {"gradientClipNorm": 1.0, "gradientClipValue": 1.0},
    "`emaDecay`": {"emaDecay": 0.99},
    '`nonFiniteLoss="skip"`': {"nonFiniteLoss": "skip"},
    "`deterministic`": {"deterministic": True},
    "`compile`": {"compile": True},
    "`channelsLast`": {"channelsLast": True},
    "`syncBatchNorm`": {"syncBatchNorm": True},
    "validation, early stopping": {"validationIndicatorCol": "held_out", "earlyStoppingPatience": 2},
    "`modelDir`": {"modelDir": "/models"},
    "`classWeights`": {"classWeights": "balanced"},
    "a function that makes the optimizer": {"optimizer": lambda parameters: None},
    "a LightningModule": {"module": LightningModule},
}
INTRO = """# What goes with which strategy

Each ✓ and ✗ is what the checks of a fit answered when this page was built, for four workers: rows are settings, columns
are values of `strategy`. A number leads to the reason, with the [code](errors.md) of the error. Checks that look at the
module itself, such as whether it can be cut into stages, come on top: [strategies](strategies.md),
[models that no worker could hold](model_parallel.md).

Rows that do not divide evenly and sample weights work with all of them. A search judges a trial by one model, so it
takes all but `independent`.
"""


class Net(nn.Module):
    """Any module: what is asked here does not depend on it."""


class Lit(LightningModule):
    """Any LightningModule."""

    def forward(self, x: Any) -> Any:
        """Is not called."""

    def training_step(self, batch: Any, number: int) -> None:
        """Is not called."""

    def configure_optimizers(self) -> None:
        """Is not called."""


def refused(strategy: str, options: dict[str, Any], feature: dict[str, Any]) -> SparkTorchError | None:
    """Returns the error of a fit with a strategy and a feature, `None` if it would begin."""
    module = Lit if "module" in feature else Net
    params = {**feature, "module": module, "strategy": strategy, "strategyParams": options, "numWorkers": WORKERS}
    try:
        translate(TorchClassifier(**params), "classification")
    except SparkTorchError as error:
        return error
    return None


def page() -> str:
    """Returns the page, as Markdown."""
    columns = [(name, variant, options) for name in STRATEGIES for variant, options in OPTIONS.get(name, [("", {})])]
    heads = [
        " ".join([re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=depen)", "&shy;", name), variant]) for name, variant, _ in columns
    ]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{':-:|' * len(columns)}"]
    notes: dict[str, int] = {}
    for feature, params in FEATURES.items():
        cells = []
        for name, _, options in columns:
            error = refused(name, options, params)
            if error is None:
                cells.append("✓")
                continue
            note = f"{error.what}: {error.hint} `[{error.code}]`".replace(f"strategy {name!r}", "the strategy")
            cells.append(f"✗ {notes.setdefault(note, len(notes) + 1)}")
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join([INTRO, *lines, "", *(f"{number}. {note}" for note, number in notes.items()), ""])
