"""Small modules with an import path, for ranks in other processes to import."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pyspark import TaskContext
from torch import nn

from sparktorch import Callback
from sparktorch.train.callbacks import FitContext


class MLP(nn.Module):
    """`inputs` -> `hidden` -> `outputs`, tanh between."""

    def __init__(self, inputs: int = 5, outputs: int = 1, hidden: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out

    def stages(self) -> list[nn.Module]:
        return list(self.body)


class Fixed(MLP):
    """Begins with the same values in whatever way it is made."""

    def __init__(self, inputs: int = 5, outputs: int = 1, hidden: int = 16) -> None:
        super().__init__(inputs, outputs, hidden)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            parameter.data.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).sin().view_as(parameter))


class DigitsCNN(nn.Module):
    """A convolution over 8x8 pixels, ten scores."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, padding=1)
        self.head = nn.Linear(channels * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.conv(x.view(-1, 1, 8, 8))).flatten(1))
        return out


class TwoInputs(nn.Module):
    """Embeds an integer, adds a number; returns both parts and their sum by name."""

    def __init__(self, size: int = 10, named: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(size, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.named = named

    def forward(self, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        base = self.embed(index).squeeze(-1)
        total = base + self.scale * value
        return {"total": total, "base": base} if self.named else total


class Faulty(MLP):
    """Raises in training, once a batch holds a row whose first feature is above 1e6."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and (x[:, 0] > 1e6).any():
            raise ArithmeticError("the planted row has come")
        return super().forward(x.clamp(max=10))


class Slow(MLP):
    """Takes its time over every batch it is trained on."""

    def __init__(self, outputs: int = 3, seconds: float = 0.05) -> None:
        super().__init__(outputs=outputs)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.seconds)
        return super().forward(x)


class Unlogged(MLP):
    """Refuses to be trained where MLflow is, or a credential for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and TaskContext.get() is not None:
            assert "mlflow" not in sys.modules
            assert "MLFLOW_TRACKING_TOKEN" not in os.environ
        return super().forward(x)


class Counted(nn.Linear):
    """Notes every row that goes through it, as a byte in a file."""

    def __init__(self, in_features: int, out_features: int, marks: str) -> None:
        super().__init__(in_features, out_features)
        self.marks = marks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(self.marks, "a") as file:
            file.write("x" * len(x))
        return super().forward(x)


class Dies(Callback):
    """Kills one worker after one step, as often as it is told to; hears of the epochs on the driver."""

    ranks = "all"

    def __init__(self, marks: Path, *, rank: int, step: int, times: int = 1) -> None:
        self.told: list[dict[str, Any]] = []
        self._marks, self._rank, self._step, self._times = marks, rank, step, times

    def on_step_end(self, context: FitContext) -> None:
        if (context.world.rank, context.step) != (self._rank, self._step):
            return
        before = self._marks.read_text() if self._marks.exists() else ""
        if len(before) < self._times:
            self._marks.write_text(before + "x")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_driver_epoch(self, record: dict[str, Any]) -> None:
        self.told.append(record)


def only_in_tasks() -> nn.Module:
    """A module that only Spark's tasks build."""
    if TaskContext.get() is None:
        raise MemoryError("built on the driver")
    return nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
