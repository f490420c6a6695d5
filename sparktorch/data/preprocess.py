"""A callable of the user's between columns and `forward`: text to tokens, augmentation, whatever takes code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparktorch.errors import ConfigError, ModuleError

__all__ = ["EVALUATION", "Preprocess", "StepContext", "check_signature"]

Function = Callable[..., Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class StepContext:
    """When rows are taken.

    Attributes:
        epoch: Number of the epoch, from 0; `None` in validation and scoring.
        seed: Of what is random about them.
    """

    epoch: int | None
    seed: int


EVALUATION = StepContext(None, 0)


class Preprocess:
    """Makes the arguments of `forward` of the input columns.

    Attributes:
        function: The callable.
        names: The input columns, by the names that it knows them by.
        arguments: The tensors that it returns, in the order of the arguments of `forward`; `None` until the
            first row has shown them.
    """

    def __init__(self, function: Function, names: Sequence[str], arguments: Sequence[str] | None = None) -> None:
        """Takes the callable, the names of the columns that it gets, and of the tensors that it returns."""
        self.function, self.names = function, tuple(names)
        self.arguments = None if arguments is None else tuple(arguments)

    def returning(self, arguments: Iterable[str]) -> Preprocess:
        """Returns the same with the names of the tensors that it has returned, in their order."""
        return Preprocess(self.function, self.names, tuple(arguments))

    def __call__(
        self, columns: Sequence[tuple[Any, ...]], rows: int, context: StepContext = EVALUATION
    ) -> dict[str, torch.Tensor]:
        """Returns the tensors by the names that the callable gives them, in the order of `arguments`.

        Args:
            columns: What each column is, a tuple of one, or of two where it is padded.
            rows: Number of rows.
            context: When.

        Raises:
            ModuleError: The callable did not return tensors of so many rows, or not those of the first row.
        """
        named = {
            name: column if len(column) > 1 else column[0] for name, column in zip(self.names, columns, strict=True)
        }
        generator = torch.Generator().manual_seed(context.seed)
        found = self.function(named, epoch=context.epoch, generator=generator)
        if not isinstance(found, Mapping) or not found:
            raise self._refused(f"returned {type(found).__name__}")
        for name, tensor in found.items():
            if not isinstance(tensor, torch.Tensor):
                raise self._refused(f"returned {type(tensor).__name__} as {name!r}")
            if not tensor.dim() or len(tensor) != rows:
                raise self._refused(f"returned {name!r} of shape {tuple(tensor.shape)} for {rows} rows")
        if self.arguments is None:
            return dict(found)
        if set(found) != set(self.arguments):
            raise self._refused(f"returned {_listed(found)}, and {_listed(self.arguments)} for the first row")
        return {name: found[name] for name in self.arguments}

    def _refused(self, what: str) -> ModuleError:
        return ModuleError(
            f"preprocess {getattr(self.function, '__qualname__', self.function)} {what}",
            hint="return a dict of tensors, one for each argument of forward, with a row for each row",
            param="preprocess",
        )


def _listed(names: Iterable[str]) -> str:
    return " and ".join(map(repr, names))


def check_signature(function: Any) -> None:
    """Refuses what cannot be called as `function(columns, epoch=..., generator=...)`.

    Raises:
        ConfigError: It is no callable, or takes other arguments.
    """
    try:
        parameters = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = set()
    if not {"epoch", "generator"} < parameters:
        raise ConfigError(
            f"preprocess {getattr(function, '__qualname__', function)!s} does not take the epoch and a generator",
            hint="define it as preprocess(columns, *, epoch, generator)",
            param="preprocess",
        )
