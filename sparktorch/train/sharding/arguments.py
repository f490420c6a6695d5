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
    """What a module is called with: all values, flattened, how they were nested, and which are tensors with rows."""

    values: list[Any]
    spec: Any
    places: list[int]

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
        return [self.values[place] for place in self.places]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.tensors[0])

    @property
    def form(self) -> str:
        """All but the tensors, as text."""
        return repr(([None if i in self.places else value for i, value in enumerate(self.values)], self.spec))

    def filled(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and named arguments with other tensors in place of these."""
        values = list(self.values)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return args, kwargs

    def to(self, device: torch.device) -> Arguments:
        """Returns arguments whose tensors lie on a device."""
        return replace(self, values=[v.to(device) if isinstance(v, torch.Tensor) else v for v in self.values])

    def call_again(self, module: nn.Module) -> Any:
        """Calls a module with copies of the tensors, which it may change in place."""
        return self.call(module, *map(torch.clone, self.tensors))

    def call(self, module: nn.Module, *tensors: torch.Tensor) -> Any:
        """Calls a module with other tensors in place of these."""
        args, kwargs = self.filled(tensors)
        return module(*args, **kwargs)
