"""Lets a training step run where the module it calls is a pipeline: first for the arguments, then for the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError, SparkTorchError
from sparktorch.train.numerics.determinism import untouched_generators
from sparktorch.train.pipeline.checks import check_rows, is_fake
from sparktorch.train.pipeline.stage import bare
from sparktorch.train.recipe.loss import Sums
from sparktorch.train.sharding.arguments import Arguments

__all__ = ["MicroLosses", "arguments_of", "check_step", "stand_in"]

Step = Callable[[nn.Module, Batch], tuple[torch.Tensor, Sums]]


def _refused(what: str, hint: str = "") -> ModuleError:
    hint = hint or "compute the loss from what one call of the module returns, or use strategyParams.shard"
    return ModuleError(f"the training step {what}", hint=hint, param="trainingStep")


def stand_in(module: nn.Module, instead: Callable[..., Any]) -> nn.Module:
    """Returns what stands for a module where a training step calls it: it has its methods, and none of its parts."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise _refused("uses parameters or parts of the module, of which a stage of a pipeline has its own only")

    made: nn.Module = bare(module, instead)
    vars(made).update(named_parameters=refuse, named_modules=refuse, state_dict=refuse)
    return made


class _Called(BaseException):
    """Ends a training step where it calls the module; no `except Exception` of a user's stops it."""


def arguments_of(step: Step, module: nn.Module, batch: Batch) -> Arguments:
    """Returns what a training step calls the module with."""
    found: list[Arguments] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        found.append(Arguments.of(args, kwargs))
        raise _Called

    try:
        step(stand_in(module, called), batch)
    except _Called:
        return found[0]
    raise _refused(
        "does not call the module, which strategyParams.pipeline passes rows through",
        "call module(...) once in trainingStep, or use strategyParams.shard instead of pipeline",
    )


def check_step(step: Step, module: nn.Module, batch: Batch) -> Arguments | None:
    """Compares a training step with the same step where a stand-in returns the module's output.

    A step that fails anyway is left to the dry run, which says why; then nothing is returned.

    Returns:
        What it calls the module with.
    """
    device = batch.inputs[0].device
    try:
        with untouched_generators(device):
            expected = step(module, batch)[0]
    except Exception:
        return None
    try:
        with untouched_generators(device):
            given = arguments_of(step, module, batch)
            check_rows(given.tensors, len(batch.inputs[0]), "the training step calls the module with", "trainingStep")
            output = given.call(module, *map(torch.clone, given.tensors))  # it may change them in place
            check_rows(pytree.tree_leaves(output), given.rows)
            values = not is_fake(given.tensors)
            found = MicroLosses(step, module, batch, given, compare=values)(output, 0, given.rows)
    except SparkTorchError:
        raise
    except Exception as error:  # such as of a part of the module
        raise _refused(f"fails where a pipeline stands for its module: {type(error).__name__}: {error}") from error
    if values and not torch.allclose(expected.sum(), found.sum(), rtol=1e-3, equal_nan=True):
        raise _refused("computes another loss where a pipeline stands for its module")
    return given


class MicroLosses:
    """Runs a training step for the micro-batches of a pipeline, whose outputs the module has returned."""

    def __init__(self, step: Step, module: nn.Module, batch: Batch, given: Arguments, *, compare: bool) -> None:
        """Takes a step, the user's module, all rows, and what the step calls the module with for them.

        With `compare`, the arguments for a micro-batch must be those of its rows among all.
        """
        self._step, self._module, self._batch, self._given, self._compare = step, module, batch, given, compare
        self.metrics: dict[str, Any] = {}

    def __call__(self, output: Any, first: int, last: int) -> torch.Tensor:
        """Returns the loss of an output of the rows from `first` to `last`."""
        calls = 0

        def instead(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 or (self._compare and not self._is_given(Arguments.of(args, kwargs), first, last)):
                how = "more than once" if calls > 1 else "with other values for some rows than for all of them"
                raise _refused(
                    f"calls the module {how}",
                    "with strategyParams.pipeline, it runs for all rows and again for those of a micro-batch: call "
                    "the module once, with what each row alone decides, and draw random numbers in preprocess",
                )
            return output

        found, sums = self._step(stand_in(self._module, instead), self._batch.slice(first, last))
        for name, (value, count) in sums.items():
            before = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = before[0] + value, before[1] + count
        return found

    def _is_given(self, other: Arguments, first: int, last: int) -> bool:
        pairs = zip(self._given.tensors, other.tensors, strict=True)
        same = all(torch.equal(a[first:last].nan_to_num(), b.nan_to_num()) for a, b in pairs)
        return same and str(self._given.spec) == str(other.spec)
