"""Metrics of a user's own, by import path."""

from __future__ import annotations

import torch
from torchmetrics import Metric
from torchmetrics.classification import MulticlassRecall
from torchmetrics.wrappers import ClasswiseWrapper


class Rows(Metric):
    """Counts rows."""

    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.rows += len(label)

    def compute(self) -> int:
        return int(self.rows)


class Brier(Metric):
    """The mean squared error of probabilities; keeps every row."""

    errors: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", [], dist_reduce_fx="cat")

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        assert label.dtype == torch.int64
        self.errors.append((output - label) ** 2)

    def compute(self) -> torch.Tensor:
        return torch.as_tensor(self.errors if isinstance(self.errors, torch.Tensor) else torch.cat(self.errors)).mean()


class Mean(Metric):
    """A mean of the ranks' means, which is none of the rows."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.mean = output.mean()

    def compute(self) -> torch.Tensor:
        return self.mean


class Lists(Metric):
    """Keeps lists that nobody concatenates."""

    outputs: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("outputs", [], dist_reduce_fx=None)

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.outputs.append(output)

    def compute(self) -> int:
        return len(self.outputs)


def by_class(num_classes: int) -> ClasswiseWrapper:
    """A metric within a metric, whose result is a dict."""
    return ClasswiseWrapper(MulticlassRecall(num_classes, average=None))
