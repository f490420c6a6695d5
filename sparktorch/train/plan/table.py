"""The table of a plan: what a worker needs under each strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Need", "Plan"]


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a worker needs under a strategy, in bytes.

    Attributes:
        strategy: The strategy.
        options: Its `strategyParams`.
        parameters: Parameters and buffers that it keeps.
        gradients: Gradients that it keeps.
        state: Its optimizer state.
        gathered: Parameters of other workers that it has at the same time.
        activations: What a forward pass keeps for the backward pass, and its inputs.
        on_host: What of this is in the host's memory, not in that of its device.
        sent: What it sends in a step.
        refused: Why the strategy cannot train this; then all figures are 0.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    parameters: int = 0
    gradients: int = 0
    state: int = 0
    gathered: int = 0
    activations: int = 0
    on_host: int = 0
    sent: int = 0
    refused: str = ""

    @property
    def total(self) -> int:
        """Bytes that it needs at once, of its device if it has one, but for what kernels and allocators take."""
        return self.parameters + self.gradients + self.state + self.gathered + self.activations - self.on_host


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What each strategy takes of a worker; printed or shown, it is a table.

    Attributes:
        needs: One entry per strategy and its sizes.
        workers: Number of workers.
        rows: Rows of a worker in a forward pass.
        parameters: Number of the module's parameters.
        memory: Bytes that a worker has, if they were given.
    """

    needs: tuple[Need, ...]
    workers: int
    rows: int
    parameters: int
    memory: int | None = None

    @property
    def fitting(self) -> list[Need]:
        """Those that fit into the memory of a worker, the simplest first; all that are possible without a memory."""
        possible = [need for need in self.needs if not need.refused]
        return [need for need in possible if self.memory is None or need.total <= self.memory]

    def __str__(self) -> str:
        names = ("parameters", "gradients", "state", "gathered", "activations", "total", "sent")
        table = [["strategy", *names[:2], "optimizer", *names[3:6], "sent a step", ""]]
        for need in self.needs:
            title = " ".join([need.strategy, *(f"{name}={value}" for name, value in need.options.items())])
            figures = ["-" if need.refused else _in_units(getattr(need, name)) for name in names]
            fits = "" if self.memory is None else "fits" if need.total <= self.memory else "too large"
            if need.on_host:
                fits = f"{fits}, {_in_units(need.on_host)} in the host's memory".removeprefix(", ")
            table.append([title, *figures, need.refused or fits])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]).rstrip()
            for row in table
        ]
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        title = f"{self.parameters:,} parameters, {workers}, {self.rows:,} rows of each at a time"
        return "\n".join([title, "", *lines])

    __repr__ = __str__


def _in_units(count: int) -> str:
    """Returns a number of bytes as text."""
    for size, unit in ((1e3, "KB"), (1e6, "MB")):
        if round(count / size, 1) < 1000:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e9:,.2f} GB"
