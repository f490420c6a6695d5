"""Lets a training step run where the module it calls is a pipeline: first for the arguments, then for the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError, SparkTorchError
from sparktorch.train.pipeline.arguments import Arguments
from sparktorch.train.pipeline.pipe import check_rows
from sparktorch.train.recipe.loss import Sums

__all__ = ["MicroLosses", "StandIn", "arguments_of", "check_step"]


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
        if name in ("device", "dtype"):  # which models of transformers look for among their parameters
            return getattr(self._parts[0], name)
        defined = inspect.getattr_static(type(self._parts[0]), name, None)
        if isinstance(defined, FunctionType):  # a method, whose calls of the module and of its parts come here, too
            return MethodType(defined, self)
        if isinstance(defined, property) and defined.fget is not None:
            return defined.fget(self)
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


def check_step(step: Callable[[nn.Module, Batch], Any], module: nn.Module, batch: Batch) -> None:
    """Refuses, in the dry run, a training step that cannot run where its module is a pipeline.

    A step that fails anyway is left to the dry run, which says why.

    Args:
        step: The training step.
        module: The module, with all of its parameters; of fake tensors, arguments are not compared.
        batch: A few rows.

    Raises:
        ModuleError: It uses parts of the module, or calls it several times, not at all, with other values again, or for
            something else than an output of each row; or it fails there alone.
    """
    from torch._subclasses import FakeTensor

    with torch.random.fork_rng(devices=()):
        try:
            step(module, batch)
        except Exception:
            return
        try:
            given = arguments_of(step, module, batch)
            _check_given(given, len(batch.inputs[0]))
            output = given.call(module, *(tensor.clone() for tensor in given.tensors))  # it may change them in place
            check_rows([value for value in pytree.tree_leaves(output) if isinstance(value, torch.Tensor)], given.rows)
            compare = not any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in given.tensors)
            step(StandIn(module, _once(output, given, compare=compare)), batch)
        except SparkTorchError:
            raise
        except Exception as error:  # such as of `super()` in a method
            raise ModuleError(
                f"the training step fails where a pipeline stands for its module: {type(error).__name__}: {error}",
                hint="compute the loss from what one call of the module returns, or use strategyParams.shard",
                param="trainingStep",
            ) from error


def _check_given(given: Arguments, rows: int) -> None:
    """Refuses arguments without a row for each row of the batch, which micro-batches cannot be made of."""
    for tensor in given.tensors:
        if len(tensor) != rows:
            raise ModuleError(
                f"the training step calls the module with a tensor of shape {tuple(tensor.shape)} for {rows} rows, and "
                "a pipeline computes on a micro-batch at a time",
                hint="pass tensors with a row for each row, such as several views of it side by side, or use "
                "strategyParams.shard",
                param="trainingStep",
            )


class MicroLosses:
    """Runs a training step for the micro-batches of a pipeline, whose outputs the module has returned.

    Attributes:
        metrics: The sums of the step's metrics so far, and of their weights.
    """

    def __init__(
        self,
        step: Callable[[nn.Module, Batch], tuple[torch.Tensor, Sums]],
        module: nn.Module,
        batch: Batch,
        given: Arguments,
        *,
        compare: bool,
    ) -> None:
        """Takes the step, the user's module, all rows, and what the step calls the module with for them.

        Args:
            step: The training step.
            module: The module.
            batch: All rows.
            given: The arguments for all rows.
            compare: Whether to compare them with those for a micro-batch.
        """
        self._step, self._module, self._batch, self._given, self._compare = step, module, batch, given, compare
        self.metrics: dict[str, Any] = {}

    def __call__(self, output: Any, first: int, last: int) -> torch.Tensor:
        """Returns the loss of an output of the rows from `first` to `last`."""
        given = self._given
        tensors = iter(tensor[first:last] for tensor in given.tensors)
        rows = [next(tensors) if i in given.places else value for i, value in enumerate(given.values)]
        stands = StandIn(self._module, _once(output, replace(given, values=rows), compare=self._compare))
        found, sums = self._step(stands, _slice_of(self._batch, first, last))
        for name, (value, count) in sums.items():
            before = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = before[0] + value, before[1] + count
        return found


def _slice_of(batch: Batch, first: int, last: int) -> Batch:
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


def _once(output: Any, expected: Arguments, *, compare: bool) -> Callable[..., Any]:
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
