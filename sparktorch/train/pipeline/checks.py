"""Whether a module and a training step compute in a pipeline what they compute in one process, and how a step runs.

A training step runs where the module that it calls is a pipeline: first for the arguments, then for the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError, line_of_user, refusing
from sparktorch.train.numerics.determinism import untouched_generators
from sparktorch.train.pipeline.cut import HOW, Cut, bare
from sparktorch.train.recipe.loss import Step
from sparktorch.train.sharding.arguments import Arguments
from sparktorch.train.tensor_parallel.comparison import as_before, emptied, filled, is_fake, results_of, tolerance_of

__all__ = ["MicroLosses", "arguments_of", "check_equal", "check_rows", "check_step", "stand_in"]

_TOLERANCE = 1e-4
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


def check_equal(cut: Cut, given: Arguments, module: nn.Module) -> None:
    """Compares the stages, one after another, with the module: outputs and, in training, gradients, under one seed.

    In evaluation, the module gets two rows together, and the stages one after another. Of tensors without values,
    shapes are compared, in training.

    Raises:
        ModuleError: They differ, or the forward pass changes a buffer, or returns no row for each row.
    """
    fake = is_fake((*module.parameters(), *given.tensors))
    zeros = [] if fake else filled(module)

    def whole() -> Any:
        returned = given.call_again(module)
        check_rows(pytree.tree_leaves(returned), given.rows)
        return returned

    try:
        with as_before(module) as before:
            module.train()
            expected = results_of(module, whole)
            changed = [name for name, b in module.named_buffers() if not fake and not torch.equal(b, before[name])]
            if changed:
                raise _differs(
                    f"the forward pass of {type(module).__name__} changes buffer {changed[0]!r}, and a pipeline "
                    "computes on a micro-batch and its padding at a time",
                    f"leave it as it is in training, or {_SHARD}",
                )
            staged = results_of(module, lambda: _composed(cut, given, module, given.tensors))
            if expected.difference(staged, tolerance_of(module, _TOLERANCE)):
                raise _differs(f"{_stages(module)} compute something else than it: other outputs or gradients")
            if not fake:
                _check_evaluation(cut, given, module)
    finally:
        emptied(module, zeros)


@torch.no_grad()
def _check_evaluation(cut: Cut, given: Arguments, module: nn.Module) -> None:
    """Compares outputs in evaluation: of the first row and a made-up one together, and of each in the stages."""
    module.eval()
    first = [tensor[:1] for tensor in given.tensors]
    other = [_another(row) for row in first]

    def both() -> Any:
        return given.call(module, *(torch.cat(pair) for pair in zip(first, other, strict=True)))

    def apart() -> list[torch.Tensor]:
        composed = (_composed(cut, given, module, row) for row in (first, other))
        return [torch.cat(pair) for pair in zip(*composed, strict=True)]

    try:
        together = results_of(module, both)
    except Exception:  # The module does not take the second row, which is made up.
        return
    if not together.drawn and together.difference(results_of(module, apart), tolerance_of(module, _TOLERANCE)):
        raise _differs(
            f"{type(module).__name__} computes another output of a row beside another one, or in evaluation something "
            "else than its stages, and a pipeline computes on a micro-batch at a time",
            f"compute each row by itself, as nn.LayerNorm does, or {_SHARD}",
        )


def _another(row: torch.Tensor) -> torch.Tensor:
    """Returns another row that a module takes where it takes this one; of some, only the same."""
    if row.is_floating_point():
        return row / 2 + 0.25
    return row.flip(-1) if row.dim() > 1 and row.dtype is not torch.bool else row


def _composed(cut: Cut, given: Arguments, module: nn.Module, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns what the stages return, one after another."""
    passed: Sequence[torch.Tensor] = ()
    try:
        for number in range(len(cut.starts)):
            stage = cut.stage(number)
            stage.given = given
            passed = stage(*passed, **{str(place): tensor.clone() for place, tensor in enumerate(tensors)})
    except Exception as error:
        what = f"fail{line_of_user(error)}: {type(error).__name__}: {error}"
        raise _differs(f"{_stages(module)} {what}") from error
    return list(passed)


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
    fails = "the training step fails where a pipeline stands for its module"  # such as a part of the module
    with refusing(fails, _ONE_CALL, param="trainingStep"), untouched_generators(device):
        given = arguments_of(step, module, batch)
        check_rows(given.tensors, len(batch.inputs[0]), "the training step calls the module with", "trainingStep")
        output = given.call(module, *map(torch.clone, given.tensors))  # it may change them in place
        check_rows(pytree.tree_leaves(output), given.rows)
        values = not is_fake(given.tensors)
        found = MicroLosses(step, module, batch, given, compare=values)(output, 0, given.rows)
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
