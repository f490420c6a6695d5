"""What is refused before a module is cut: by one table, and by one comparison of the stages with the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError, Refusal, line_of_user
from sparktorch.train.numerics.determinism import untouched_generators
from sparktorch.train.pipeline.cut import Cut
from sparktorch.train.pipeline.stage import HOW
from sparktorch.train.recipe.arguments import Arguments

__all__ = ["SETTINGS", "check_equal", "check_inputs", "check_parts", "check_rows", "is_fake"]

_TOLERANCE = 1e-4
_SHARD = "use strategyParams.shard instead of pipeline"

SETTINGS = (
    Refusal(
        "module",
        lambda job: job.recipe.steps_itself,
        "a LightningModule computes in steps of its own, whose passes a pipeline cannot run",
        f"pass its network as module, with a loss, or {_SHARD}",
    ),
    Refusal(
        "compile",
        lambda job: job.config.compile,
        "compile is set, and strategyParams.pipeline calls the stages of the module, not the module",
        "leave compile out",
    ),
    Refusal(
        "precision",
        lambda job: job.config.precision == "fp16",
        "precision 'fp16' scales the loss, and strategyParams.pipeline divides the gradients",
        "set precision='bf16'",
    ),
    Refusal(
        "strategyParams",
        lambda job: job.options.param_dtype,
        "strategyParams.param_dtype is set, and stages of a pipeline pass on values in the dtypes of the module",
        "set precision='bf16', which leaves parameters as they are, or leave it out",
    ),
)
# Of parts of the module: where it applies, what the message says, and what to do.
_PARTS: Sequence[tuple[Callable[[Any], object], str, str]] = (
    (lambda part: hasattr(part, "peft_config"), "has adapters, which a pipeline does not cut", _SHARD),
    (
        lambda part: isinstance(part, nn.modules.batchnorm._BatchNorm),
        "is batch normalisation, and a pipeline computes on a micro-batch at a time",
        "use nn.GroupNorm or nn.LayerNorm, or leave strategyParams.pipeline out",
    ),
    (
        lambda part: isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse,
        "has sparse gradients, which ranks of a pipeline do not clip or measure",
        "leave sparse=True out",
    ),
    (
        lambda part: type(part).get_extra_state is not nn.Module.get_extra_state,
        "has extra state, which a rank cannot save of stages of other ranks",
        f"keep it in a buffer, or {_SHARD}",
    ),
)


def check_parts(module: nn.Module) -> None:
    """Refuses modules with parts that no pipeline can train as one process does with a `ModuleError`."""
    for name, part in module.named_modules():
        for applies, says, hint in _PARTS:
            if applies(part):
                raise ModuleError(f"{name or 'the module'} {says}", hint=hint, param="strategyParams")


def check_inputs(batch: Batch) -> None:
    """Refuses sparse and jagged inputs, which no micro-batches of one shape can be made of, with a `ModuleError`."""
    for name, tensor in zip(batch.names or [""] * len(batch.inputs), batch.inputs, strict=True):
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise ModuleError(
                f"input {name!r} is of layout {str(tensor.layout).removeprefix('torch.')}, which a pipeline cannot cut "
                "into micro-batches of one shape",
                hint="set inputLayouts to 'dense' or 'padded' for the column, or leave strategyParams.pipeline out",
                param="strategyParams",
            )


def check_rows(values: Iterable[Any], rows: int, what: str = "the module returns", param: str = "module") -> None:
    """Refuses tensors without a row for each row, which micro-batches cannot be made of, with a `ModuleError`."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.shape[:1] != (rows,):
            raise ModuleError(
                f"{what} a tensor of shape {tuple(value.shape)} for {rows} rows, and a pipeline computes on a "
                "micro-batch at a time",
                hint="let tensors have a row for each row, such as several views side by side, or models of "
                "transformers called without labels; and compute the loss in loss or trainingStep",
                param=param,
            )


def is_fake(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor has no values."""
    from torch._subclasses import FakeTensor

    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


def check_equal(cut: Cut, given: Arguments, module: nn.Module) -> None:
    """Compares the stages, one after another, with the module: outputs and gradients, under one seed.

    In evaluation, the module gets two rows together, and the stages one after another. Of tensors without values,
    shapes are compared. Parameters that are zero, as of a head, would hide what is before them: they have other
    values meanwhile.
    """
    modes = {part: part.training for part in module.modules()}
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    comparison = _Comparison(cut, given, module)
    zeros = [] if comparison.fake else [p for p in module.parameters() if p.is_floating_point() and not p.any()]
    try:
        with torch.no_grad(), untouched_generators(given.tensors[0].device):
            for parameter in zeros:
                parameter.uniform_(-0.1, 0.1)
        comparison.train(before)
        if not comparison.fake:
            comparison.evaluate()
    finally:
        for part, mode in modes.items():
            part.training = mode
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()


class _Comparison:
    """Of a module with its stages."""

    def __init__(self, cut: Cut, given: Arguments, module: nn.Module) -> None:
        self._stages = [cut.stage(number) for number in range(len(cut.starts))]
        self._given, self._module, self._name = given, module, type(module).__name__
        self.fake = is_fake((*module.parameters(), *given.tensors))

    def train(self, before: dict[str, torch.Tensor]) -> None:
        """Compares outputs and gradients in training; the forward pass may change no buffers."""
        self._module.train()
        device, tensors = self._given.tensors[0].device, self._given.tensors
        with untouched_generators(device):
            expected = self._whole(tensors)
        changed = [n for n, b in self._module.named_buffers() if not self.fake and not torch.equal(b, before[n])]
        if changed:
            raise ModuleError(
                f"the forward pass of {self._name} changes buffer {changed[0]!r}, and a pipeline computes on a "
                "micro-batch and its padding at a time",
                hint=f"leave it as it is in training, or {_SHARD}",
                param="module",
            )
        check_rows(expected, self._given.rows)
        with untouched_generators(device):
            found = self._composed(tensors)
        if [t.shape for t in found] != [t.shape for t in expected]:
            raise self._differ("return other shapes than it")
        if self.fake:
            return
        if not _close(expected, found) or not _close(self._gradients(expected), self._gradients(found)):
            raise self._differ("compute something else than it: other outputs or gradients")

    @torch.no_grad()
    def evaluate(self) -> None:
        """Compares outputs in evaluation: of two rows together, and of each by itself."""
        self._module.eval()
        first = [tensor[:1] for tensor in self._given.tensors]
        other = [_another(row) for row in first]
        with untouched_generators(first[0].device):
            try:
                both = [torch.cat(pair) for pair in zip(first, other, strict=True)]
                together, again = self._whole(both), self._whole(both)
            except Exception:  # of the second row, which is made up
                return
            apart = [torch.cat(pair) for pair in zip(self._composed(first), self._composed(other), strict=True)]
        if _close(together, again, tolerance=0) and not _close(together, apart):
            raise ModuleError(
                f"{self._name} computes another output of a row beside another one, or in evaluation something else "
                "than its stages, and a pipeline computes on a micro-batch at a time",
                hint=f"compute each row by itself, as nn.LayerNorm does, or {_SHARD}",
                param="strategyParams",
            )

    def _whole(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        output = self._given.call(self._module, *map(torch.clone, tensors))
        return [value for value in pytree.tree_leaves(output) if isinstance(value, torch.Tensor)]

    def _composed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what the stages return, one after another."""
        passed: Sequence[torch.Tensor] = ()
        try:
            for stage in self._stages:
                stage.given = self._given
                passed = stage(*passed, **{str(place): tensor.clone() for place, tensor in enumerate(tensors)})
        except Exception as error:
            raise self._differ(f"fail{line_of_user(error)}: {type(error).__name__}: {error}") from error
        return list(passed)

    def _gradients(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the gradients of the outputs' squares; zeros where there are none."""
        trained = [p for p in self._module.parameters() if p.requires_grad]
        losses = [output.float().square().sum() for output in outputs if output.requires_grad]
        found = torch.autograd.grad(losses, trained, allow_unused=True) if losses else [None] * len(trained)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]

    def _differ(self, what: str) -> ModuleError:
        return ModuleError(f"the stages of {self._name}, one after another, {what}", hint=HOW, param="module")


def _close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], tolerance: float = _TOLERANCE) -> bool:
    """Whether tensors are equal up to a part of the largest number in each."""
    for a, b in zip(one, other, strict=True):
        a, b = a.detach().double().nan_to_num(), b.detach().double().nan_to_num()
        if a.shape != b.shape or (a.numel() and (a - b).abs().max() > tolerance * a.abs().max().clamp(min=1e-6)):
            return False
    return True


def _another(row: torch.Tensor) -> torch.Tensor:
    """Returns another row that a module takes where it takes this one; of some, only the same."""
    if row.is_floating_point():
        return row / 2 + 0.25
    return row.flip(-1) if row.dim() > 1 and row.dtype is not torch.bool else row
