"""The torchmetrics metrics that are attributes of a LightningModule."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sparktorch.errors import refusing
from sparktorch.train.recipe.metrics import quiet, reduce_over_ranks

__all__ = ["Metrics"]


class Metrics:
    """The metrics in a module, by their paths, and collections of them; none if torchmetrics has not been imported."""

    def __init__(self, module: nn.Module, device: str) -> None:
        """Finds the metrics, and lets them reduce their states over ranks of which some may have no rows."""
        torchmetrics = sys.modules.get("torchmetrics")
        known = getattr(torchmetrics, "Metric", ())
        groups = getattr(torchmetrics, "MetricCollection", ())
        self.collections = [part for part in module.modules() if isinstance(part, groups)]
        self._found: dict[str, Any] = {path: part for path, part in module.named_modules() if isinstance(part, known)}
        for metric in self._found.values():
            reduce_over_ranks(metric, device)

    def path_of(self, value: Any) -> str:
        """Returns the path of a metric in the module; empty if it is none of them."""
        return next((path for path, metric in self._found.items() if metric is value), "")

    def to(self, device: torch.device) -> None:
        """Moves the metrics to the device."""
        for metric in self._found.values():
            metric.to(device)

    def compute(self, path: str) -> float:
        """Returns a metric's value over the rows of all ranks; a collective.

        Raises:
            ModuleError: The value is not one number.
        """
        metric = self._found[path]
        with quiet():  # a rank without rows has not called update
            value = metric.compute()
        with refusing(f"metric {path!r} does not give one number", "log its values one by one"):
            return float(value)

    def reset(self, paths: Iterable[str]) -> None:
        """Resets metrics."""
        for path in paths:
            self._found[path].reset()

    @contextmanager
    def kept(self, kept: bool) -> Iterator[None]:
        """Context after which the metrics are as before, if `kept`."""
        before = self.state_dict() if kept else {}
        yield
        # As in the other ranks, a value that is computed stays so, and one that an update has removed is gone.
        self.put_back({path: (state, self._found[path]._computed) for path, state in before.items()})

    def set_aside(self, paths: Iterable[str]) -> dict[str, Any]:
        """Resets metrics; returns what `put_back` takes."""
        before = self.state_dict()
        found = {path: (before[path], self._found[path]._computed) for path in paths}
        self.reset(found)
        return found

    def put_back(self, aside: Mapping[str, Any]) -> None:
        """Restores metrics that were set aside."""
        self.load_state_dict({path: state for path, (state, _) in aside.items()})
        for path, (_, computed) in aside.items():
            self._found[path]._computed = computed

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the metrics' states by path, and how many updates made them."""
        return {path: (m._copy_state_dict(), m._update_count) for path, m in self._found.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores such states."""
        for path, (values, updates) in state.items():
            metric = self._found[path]
            for name, value in values.items():
                setattr(metric, name, _on(metric.device, value))
            metric._update_count, metric._computed = updates, None


def _on(device: torch.device, value: Any) -> Any:
    return [part.to(device) for part in value] if isinstance(value, list) else value.to(device)
