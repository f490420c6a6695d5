"""Whether a module and a training step compute in a pipeline what they compute in one process, and how a step runs.

A training step runs where the module that it calls is a pipeline: first for the arguments, then for the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError, line_of_user, refusing
from sparktorch.train.numerics.comparison import Results, in_mode, is_fake, norms_of_gradients, results_of
from sparktorch.train.numerics.determinism import untouched_generators
from sparktorch.train.pipeline.cut import HOW, Cut, bare
from sparktorch.train.recipe.loss import Step
from sparktorch.train.sharding.arguments import Arguments

__all__ = ["MicroLosses", "arguments_of", "check_equal", "check_rows", "check_step", "stand_in"]

_SHARD = "use strategyParams.shard instead of pipeline"
_ONE_CALL = "compute the loss from what one call of the module returns, or use strategyParams.shard"


def check_rows(values: Iterable[Any], rows: int, what: str = "the module returns", param: str = "module") -> None:
    """Refuses tensors that micro-batches cannot be made of with a `ModuleError`: sparse or jagged, or of other rows."""
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        strided = not value.is_nested and value.layout is torch.strided
        if not strided or value.shape[:1] != (rows,):
            form = f"shape {tuple(value.shape)}" if strided else f"layout {str(value.layout).removeprefix('torch.')}"
            raise ModuleError(
                f"{what} a tensor of {form} for {rows} rows, and a pipeline computes on a micro-batch at a time",
                hint="let tensors have a row for each row, such as several views side by side, columns of the layout "
                "'dense' or 'padded', or models of transformers called without labels; and compute the loss in loss or "
                "trainingStep",
                param=param,
            )


def check_equal(cut: Cut, arguments: Arguments, module: nn.Module) -> None:
    """Compares the module, which gets a row at a time, with its stages, which get two: outputs and gradients.

    It does so in evaluation, and not for modules that draw random numbers there. Of tensors without values, it compares
    shapes.

    Raises:
        ModuleError: They differ, or the forward pass changes a buffer in training, or returns no row for each row.
    """
    if is_fake((*module.parameters(), *arguments.tensors)):
        expected = results_of(module, partial(_whole, [arguments], module), norms_of_gradients)
    else:
        _check_buffers(arguments, module)
        arguments, expected = _of_two_rows(arguments, module)
    if expected.is_random:  # Stages, and several rows at a time, draw other numbers.
        return
    if expected.difference(results_of(module, partial(_staged, cut, arguments, module), norms_of_gradients)):
        raise _differs(
            f"{_stages(module)} and two rows at a time, compute something else than it: other outputs or gradients",
            f"compute each row by itself, as nn.LayerNorm does, and {HOW}",
        )


@torch.no_grad()
def _check_buffers(arguments: Arguments, module: nn.Module) -> None:
    """Refuses a module whose forward pass changes a buffer in training."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with untouched_generators(torch.device("cpu")), in_mode(module, training=True):
        _whole([arguments], module)
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise _differs(
                f"the forward pass of {type(module).__name__} changes buffer {name!r}, and a pipeline "
                "computes on a micro-batch and its padding at a time",
                f"leave it as it is in training, or {_SHARD}",
            )


def _of_two_rows(arguments: Arguments, module: nn.Module) -> tuple[Arguments, Results]:
    """Returns arguments of two rows, and what the module computes of each by itself.

    The second one is made up, or else the first again: the rows of a trial are copies of one.
    """
    first = [tensor[:1] for tensor in arguments.tensors]
    for second in ([_another(row) for row in first], first):
        rows = [arguments.with_tensors(first), arguments.with_tensors(second)]
        try:
            results = results_of(module, partial(_whole, rows, module), norms_of_gradients)
            return arguments.with_tensors(map(torch.cat, zip(first, second, strict=True))), results
        except Exception:  # The module may not take a row that is made up.
            if second is first:
                raise
    raise AssertionError("the last of the rows is returned or raises")


def _another(row: torch.Tensor) -> torch.Tensor:
    """Returns another row that a module takes where it takes this one; of some, only the same."""
    if row.is_floating_point():
        return row / 2 + 0.25
    return row.flip(-1) if row.dim() > 1 and row.dtype is not torch.bool else row


def _whole(parts: Iterable[Arguments], module: nn.Module) -> list[torch.Tensor]:
    """Returns the tensors that the module returns for some rows after others, which have a row for each row."""
    outputs = []
    for arguments in parts:
        leaves = pytree.tree_leaves(arguments.call(module))
        check_rows(leaves, arguments.rows)
        outputs.append([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    return [torch.cat(tensors) for tensors in zip(*outputs, strict=True)]


def _staged(cut: Cut, arguments: Arguments, module: nn.Module) -> Sequence[torch.Tensor]:
    """Returns what the stages return, one after another."""
    passed: Sequence[torch.Tensor] = ()
    try:
        for number in range(len(cut.starts)):
            stage = cut.stage(number)
            stage.arguments = arguments
            passed = stage(*passed, **{name: tensor.clone() for name, tensor in arguments.named.items()})
    except Exception as error:
        what = f"fail{line_of_user(error)}: {type(error).__name__}: {error}"
        raise _differs(f"{_stages(module)} {what}") from error
    return passed


def _stages(module: nn.Module) -> str:
    return f"the stages of {type(module).__name__}, one after another,"


def _differs(what: str, hint: str = HOW) -> ModuleError:
    return ModuleError(what, hint=hint, param="module", code="ST-PIPELINE")


def _refused(what: str, hint: str = _ONE_CALL) -> ModuleError:
    return ModuleError(f"the training step {what}", hint=hint, param="trainingStep")


def stand_in(module: nn.Module, instead: Callable[..., Any]) -> nn.Module:
    """Returns what stands for a module where a training step calls it: it has its methods, and none of its parts."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise _refused("uses parameters or parts of the module, of which a stage of a pipeline has its own only")

    copied: nn.Module = bare(module, instead)
    vars(copied).update(named_parameters=refuse, named_modules=refuse, state_dict=refuse)
    return copied


class _Called(BaseException):
    """Ends a training step where it calls the module; no `except Exception` of a user's stops it."""


def arguments_of(step: Step, module: nn.Module, batch: Batch) -> Arguments:
    """Returns what a training step calls the module with."""
    calls: list[Arguments] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(Arguments.of(args, kwargs))
        raise _Called

    try:
        step(stand_in(module, called), batch)
    except _Called:
        return calls[0]
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
    # It may take a part of the module, which the stand-in has not.
    fails = "the training step fails where a pipeline stands for its module"
    with refusing(fails, _ONE_CALL, param="trainingStep"), untouched_generators(device):
        arguments = arguments_of(step, module, batch)
        check_rows(arguments.tensors, len(batch.inputs[0]), "the training step calls the module with", "trainingStep")
        output = arguments.call(module)
        check_rows(pytree.tree_leaves(output), arguments.rows)
        values = not is_fake(arguments.tensors)
        loss = MicroLosses(step, module, batch, arguments, compare=values)(output, 0, arguments.rows)
    if values and not torch.allclose(expected.sum(), loss.sum(), rtol=1e-3, equal_nan=True):
        raise _refused("computes another loss where a pipeline stands for its module")
    return arguments


class MicroLosses:
    """Runs a training step for the micro-batches of a pipeline, whose outputs the module has returned."""

    def __init__(self, step: Step, module: nn.Module, batch: Batch, arguments: Arguments, *, compare: bool) -> None:
        """Takes a step, the user's module, all rows, and what the step calls the module with for them.

        With `compare`, the arguments for a micro-batch must be those of its rows among all.
        """
        self._step, self._module, self._batch, self._arguments = step, module, batch, arguments
        self._compare = compare
        self.metrics: dict[str, Any] = {}

    def __call__(self, output: Any, first: int, last: int) -> torch.Tensor:
        """Returns the loss of an output of the rows from `first` to `last`."""
        calls = 0

        def instead(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 or (self._compare and not self._has_rows(Arguments.of(args, kwargs), first, last)):
                how = "more than once" if calls > 1 else "with other values for some rows than for all of them"
                raise _refused(
                    f"calls the module {how}",
                    "with strategyParams.pipeline, it runs for all rows and again for those of a micro-batch: call "
                    "the module once, with what each row alone decides, and draw random numbers in preprocess",
                )
            return output

        loss, sums = self._step(stand_in(self._module, instead), self._batch.slice(first, last))
        for name, (value, count) in sums.items():
            before = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = before[0] + value, before[1] + count
        return loss

    def _has_rows(self, other: Arguments, first: int, last: int) -> bool:
        """Whether other arguments are the rows from `first` to `last` of those for all rows."""
        pairs = zip(self._arguments.tensors, other.tensors, strict=True)
        same = all(torch.equal(a[first:last].nan_to_num(), b.nan_to_num()) for a, b in pairs)
        return same and str(self._arguments.spec) == str(other.spec)
