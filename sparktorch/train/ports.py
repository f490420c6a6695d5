"""What the loop asks of the world outside: rows, and somebody to tell how far it is."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from sparktorch.train.recipe.loss import BatchLike

__all__ = ["Reporter", "ShardLike"]

T = TypeVar("T")


class ShardLike(Protocol):
    """What the loop asks of a rank's rows; see `sparktorch.data.dataset.reader.Shard`."""

    def epoch(self, epoch: int, *, least: int, first: int = 0) -> Generator[BatchLike]:
        """Yields this rank's part of every global batch from step `first` on, its inputs filled up to `least` rows."""
        ...

    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step, float64 of shape `(steps,)`."""
        ...

    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns this rank's number of rows in each step, int64 of shape `(steps,)`."""
        ...

    def validation(self, size: int, *, batches: int = 0) -> Generator[BatchLike]:
        """Yields this rank's validation rows in batches of that size, at least so many."""
        ...


class Reporter(Protocol):
    """Where the loop says how far it is; see `sparktorch.distributed.client.Link`."""

    def enter(self, phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
        """Says what the rank does now."""
        ...

    def at_step(self, step: int) -> None:
        """Notes the step the rank is at."""
        ...

    def moving(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items, each of which shows that the rank is not standing still."""
        ...

    def progress(self, **record: Any) -> None:
        """Publishes how far the training is."""
        ...

    def epoch_done(self, number: int, record: dict[str, Any]) -> None:
        """Publishes the metrics of a finished epoch."""
        ...
