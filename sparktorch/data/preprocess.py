"""The user's `preprocess`: a callable between input columns and `forward`, for tokenisation or augmentation."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sparktorch.errors import ConfigError, ModuleError

__all__ = ["EVALUATION", "LoadedPreprocess", "Preprocess", "StepContext", "check_signature"]

Function = Callable[..., Mapping[str, torch.Tensor]]


class LoadedPreprocess(ABC):
    """A `preprocess` that needs something large, such as a tokenizer: each process loads it, and it is never sent.

    Attributes:
        libraries: Names of the packages that it imports.
    """

    libraries: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def load(self) -> Any:
        """Loads what the callable needs from this machine, and returns it.

        The returned object has a method `save_pretrained(folder)`, which writes it beside a model.
        """


@dataclass(frozen=True)
class StepContext:
    """The step for which rows are taken.

    Attributes:
        epoch: The epoch of the step; `None` in validation and scoring.
        seed: Seed of the generator that the callable gets.
    """

    epoch: int | None
    seed: int


EVALUATION = StepContext(None, 0)


@dataclass(frozen=True)
class Preprocess:
    """Makes the arguments of `forward` from the input columns, by the user's callable.

    Attributes:
        function: The callable.
        names: Names of the input columns.
        arguments: Names of the tensors that the callable returns, in the order of `forward`; `None` until it has run on
            the sample row.
    """

    function: Function
    names: Sequence[str]
    arguments: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        # The class is frozen, so a list of names is replaced this way.
        object.__setattr__(self, "names", tuple(self.names))

    def __call__(
        self, columns: Sequence[tuple[Any, ...]], rows: int, context: StepContext = EVALUATION
    ) -> dict[str, torch.Tensor]:
        """Returns the callable's tensors by name, in the order of `arguments`.

        Each column is a tuple of its values, and its mask if it is padded. A `ModuleError` refuses results that are no
        dict of tensors with `rows` rows, and other names than for the sample row.
        """
        # The callable gets a column without a mask as its values alone.
        named = {
            name: column if len(column) > 1 else column[0] for name, column in zip(self.names, columns, strict=True)
        }
        generator = torch.Generator().manual_seed(context.seed)
        tensors = self.function(named, epoch=context.epoch, generator=generator)
        problem = self._problem_with(tensors, rows)
        if problem:
            raise ModuleError(
                f"preprocess {getattr(self.function, '__qualname__', self.function)} returned {problem}",
                hint="return a dict of tensors, one for each argument of forward, with a row for each row",
                param="preprocess",
                code="ST-PREPROCESS",
            )
        return {name: tensors[name] for name in self.arguments or tensors}

    def _problem_with(self, result: Any, rows: int) -> str:
        """Returns what is wrong with the callable's result; empty if nothing is."""
        if not isinstance(result, Mapping) or not result:
            return type(result).__name__
        for name, tensor in result.items():
            if not isinstance(tensor, torch.Tensor):
                return f"{type(tensor).__name__} as {name!r}"
            if not tensor.dim() or len(tensor) != rows:
                return f"{name!r} of shape {tuple(tensor.shape)} for {rows} rows"
        if self.arguments is not None and set(result) != set(self.arguments):
            return f"{_joined(result)}, and {_joined(self.arguments)} for the first row"
        return ""


def _joined(names: Iterable[str]) -> str:
    return " and ".join(map(repr, names))


def check_signature(function: Any) -> None:
    """Refuses a `function` that cannot be called as `function(columns, epoch=..., generator=...)`."""
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
