"""A rank's training rows as a data set of torch's, for loops that bring their own `DataLoader`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from sparktorch.data.dataset.base import Shard

__all__ = ["RankRows"]


class RankRows(Dataset[tuple[torch.Tensor, ...]]):
    """The training rows of one rank, by number: tuples of the inputs, then the label if there is one, then the weight.

    A list or slice of numbers gives tensors with a row for each.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __len__(self) -> int:
        return self._shard.rows

    def __getitem__(self, index: int | slice | Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Returns one row, or several.

        Raises:
            IndexError: There is no such row.
        """
        if hasattr(index, "__index__") and getattr(index, "ndim", 0) == 0:
            return tuple(tensor[0] for tensor in self[[operator.index(index)]])
        assert not isinstance(index, int)
        every = range(len(self))
        numbers = every[index] if isinstance(index, slice) else [every[operator.index(one)] for one in index]
        batch = self._shard.select(torch.tensor(list(numbers), dtype=torch.int64))
        more = (batch.label, batch.weight)
        return (*batch.inputs, *(tensor for tensor in more if tensor is not None))

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, ...]]:
        """Returns several rows, one tuple each, as `DataLoader` asks for a batch."""
        return list(zip(*(tensor.unbind() for tensor in self[indices]), strict=True))
