"""Lets a training step run where the module it calls is a pipeline: first for the arguments, then for the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError
from sparktorch.train.pipeline.arguments import Arguments

__all__ = ["StandIn", "arguments_of", "once", "slice_of"]


class StandIn(nn.Module):
    """Stands for a module where a training step calls it."""

    def __init__(self, module: nn.Module, instead: Callable[..., Any]) -> None:
        """Takes the module and what is called instead of it."""
        super().__init__()
        self._parts, self._instead = (module,), instead
        self.training = module.training

    @property
    def module(self) -> nn.Module:
        """The module that it stands for."""
        return self._parts[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what stands for the module."""
        return self._instead(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_parts", "_instead"):
            return super().__getattr__(name)
        found = getattr(self._parts[0], name)
        if isinstance(found, nn.Module | torch.Tensor):
            raise self._refused(repr(name))
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses to list parameters, of which a stage has some only."""
        raise self._refused("parameters")

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses to list parts, of which a stage has some only."""
        raise self._refused("parts")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses to return weights, of which a stage has some only."""
        raise self._refused("weights")

    def _refused(self, what: str) -> ModuleError:
        return ModuleError(
            f"the training step uses {what} of the module, of which a stage of a pipeline has its own only",
            hint="compute the loss from what one call of the module returns, or use strategyParams.shard",
            param="trainingStep",
        )


class _Called(BaseException):
    """Ends a training step where it calls the module; no `except Exception` of a user's stops it."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.arguments = arguments


def arguments_of(step: Callable[[nn.Module, Batch], Any], module: nn.Module, batch: Batch) -> Arguments:
    """Returns what a training step calls the module with.

    Raises:
        ModuleError: It does not call it.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        raise _Called(Arguments.of(args, kwargs))

    try:
        step(StandIn(module, called), batch)
    except _Called as found:
        return found.arguments
    raise ModuleError(
        "the training step does not call the module, which strategyParams.pipeline passes rows through",
        hint="call module(...) once in trainingStep, or use strategyParams.shard instead of pipeline",
        param="trainingStep",
    )


def slice_of(batch: Batch, first: int, last: int) -> Batch:
    """Returns rows of a batch."""

    def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[first:last]

    return replace(
        batch,
        inputs=tuple(tensor[first:last] for tensor in batch.inputs),
        label=part(batch.label),
        weight=part(batch.weight),
        loss_weight=part(batch.loss_weight),
        rows=last - first,
    )


def once(output: Any, expected: Arguments, *, compare: bool) -> Callable[..., Any]:
    """Returns a function that stands for a module, and returns its output where it is called as before.

    Args:
        output: The module's output.
        expected: What it has been called with.
        compare: Whether to compare that with what it is called with now.
    """
    calls = 0

    def instead(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        reason = "more than once" if calls > 1 else ""
        if not reason and compare and not _same(Arguments.of(args, kwargs), expected):
            reason = "with other values for some rows than for all of them"
        if reason:
            raise ModuleError(
                f"the training step calls the module {reason}",
                hint="with strategyParams.pipeline, it runs for all rows and again for those of a micro-batch: call "
                "the module once, with what each row alone decides, and draw random numbers in preprocess",
                param="trainingStep",
            )
        return output

    return instead


def _same(one: Arguments, other: Arguments) -> bool:
    pairs = zip(one.tensors, other.tensors, strict=True)
    return one.form == other.form and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
