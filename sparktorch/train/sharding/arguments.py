"""What a module is called with, taken apart so that the tensors can be others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.train.recipe.adapter import arguments

__all__ = ["Arguments"]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: all values, flattened, how they were nested, and the positions of tensors with rows."""

    values: list[Any]
    spec: Any
    positions: list[int]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Takes the arguments of a call."""
        values, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        return cls(
            values, spec, [i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.dim()]
        )

    @classmethod
    def of_batch(cls, batch: Batch, module: nn.Module) -> Arguments:
        """Takes those of a call with a batch, without labels, with which a model may compute a loss, too."""
        args, kwargs = arguments(batch, module)
        kwargs.pop("labels", None)
        return cls.of(args, kwargs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with rows."""
        return [self.values[position] for position in self.positions]

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The tensors with rows, by names in their order."""
        return {f"input_{number}": tensor for number, tensor in enumerate(self.tensors)}

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.tensors[0])

    @property
    def form(self) -> str:
        """All but the tensors, as text."""
        values = [None if i in self.positions else value for i, value in enumerate(self.values)]
        return repr((values, self.spec))

    def filled(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and named arguments with other tensors in place of these."""
        values = list(self.values)
        for position, tensor in zip(self.positions, tensors, strict=True):
            values[position] = tensor
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return args, kwargs

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> Arguments:
        """Returns arguments with other tensors in place of these."""
        return Arguments.of(*self.filled(tensors))

    def to(self, device: torch.device) -> Arguments:
        """Returns arguments whose tensors lie on a device."""
        return replace(self, values=[v.to(device) if isinstance(v, torch.Tensor) else v for v in self.values])

    def call(self, module: nn.Module) -> Any:
        """Calls a module with copies of the tensors, which it may change in place."""
        args, kwargs = self.filled(map(torch.clone, self.tensors))
        return module(*args, **kwargs)
