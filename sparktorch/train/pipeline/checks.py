"""What a pipeline refuses of a module before it is cut, and the comparison of its stages with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.errors import ModuleError, line_of_user
from sparktorch.train.numerics.determinism import untouched_generators
from sparktorch.train.pipeline.cut import Cut
from sparktorch.train.pipeline.stage import HOW
from sparktorch.train.sharding.arguments import Arguments

__all__ = ["check_equal", "check_parts", "check_rows", "is_fake"]

_TOLERANCE = 1e-4
_SHARD = "use strategyParams.shard instead of pipeline"


def check_parts(module: nn.Module) -> None:
    """Refuses modules with parts that no pipeline can train as one process does with a `ModuleError`."""
    for name, part in module.named_modules():
        what = _untrainable(part)
        if what:
            raise ModuleError(
                f"{name or 'the module'} has {what}, which stages of a pipeline do not train as one process does",
                hint=f"normalise each row by itself, as nn.LayerNorm does; leave sparse=True out; or {_SHARD}",
                param="strategyParams",
                code="ST-PIPELINE",
            )


def _untrainable(part: Any) -> str | None:
    """Returns what a part has that needs whole batches, or the whole module, in one rank."""
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        return "batch normalisation"
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
        return "sparse gradients"
    if type(part).get_extra_state is not nn.Module.get_extra_state:
        return "extra state"
    return "adapters" if hasattr(part, "peft_config") else None


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


def is_fake(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor has no values."""
    from torch._subclasses import FakeTensor

    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


def check_equal(cut: Cut, given: Arguments, module: nn.Module) -> None:
    """Compares the stages, one after another, with the module: outputs and, in training, gradients, under one seed.

    In evaluation, the module gets two rows together, and the stages one after another. Of tensors without values,
    shapes are compared, in training. Parameters that are zero, as of a head, would hide what is before
    them: they have other values meanwhile.

    Raises:
        ModuleError: They differ, or the forward pass changes a buffer, or returns no row for each row.
    """
    fake, device = is_fake((*module.parameters(), *given.tensors)), given.tensors[0].device
    modes = {part: part.training for part in module.modules()}
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    zeros = [] if fake else [p for p in module.parameters() if p.is_floating_point() and not p.any()]
    trained = [p for p in module.parameters() if p.requires_grad]
    try:
        module.train()
        with torch.no_grad(), untouched_generators(device):
            for parameter in zeros:
                parameter.uniform_(-0.1, 0.1)
        with untouched_generators(device):
            expected = _whole(given, module, given.tensors)
        changed = [name for name, b in module.named_buffers() if not fake and not torch.equal(b, before[name])]
        if changed:
            raise ModuleError(
                f"the forward pass of {type(module).__name__} changes buffer {changed[0]!r}, and a pipeline computes "
                "on a micro-batch and its padding at a time",
                hint=f"leave it as it is in training, or {_SHARD}",
                param="module",
                code="ST-PIPELINE",
            )
        check_rows(expected, given.rows)
        with untouched_generators(device):
            found = _composed(cut, given, module, given.tensors)
        alike = [t.shape for t in found] == [t.shape for t in expected]
        if alike and not fake:
            alike = _close(expected, found) and _close(_gradients(expected, trained), _gradients(found, trained))
        if not alike:
            raise _differ(module, "compute something else than it: other outputs or gradients")
        if not fake:
            _check_evaluation(cut, given, module)
    finally:
        for part, mode in modes.items():
            part.training = mode
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])
            for parameter in zeros:
                parameter.zero_()


@torch.no_grad()
def _check_evaluation(cut: Cut, given: Arguments, module: nn.Module) -> None:
    """Compares outputs in evaluation: of the first row and a made-up one together, and of each in the stages."""
    module.eval()
    first = [tensor[:1] for tensor in given.tensors]
    other = [_another(row) for row in first]
    with untouched_generators(first[0].device):
        try:
            both = [torch.cat(pair) for pair in zip(first, other, strict=True)]
            together, again = _whole(given, module, both), _whole(given, module, both)
        except Exception:  # of the second row
            return
        apart = zip(_composed(cut, given, module, first), _composed(cut, given, module, other), strict=True)
        found = [torch.cat(pair) for pair in apart]
    draws = any(not torch.equal(one, two) for one, two in zip(together, again, strict=True))
    if not draws and not _close(together, found):
        raise ModuleError(
            f"{type(module).__name__} computes another output of a row beside another one, or in evaluation something "
            "else than its stages, and a pipeline computes on a micro-batch at a time",
            hint=f"compute each row by itself, as nn.LayerNorm does, or {_SHARD}",
            param="strategyParams",
            code="ST-PIPELINE",
        )


def _another(row: torch.Tensor) -> torch.Tensor:
    """Returns another row that a module takes where it takes this one; of some, only the same."""
    if row.is_floating_point():
        return row / 2 + 0.25
    return row.flip(-1) if row.dim() > 1 and row.dtype is not torch.bool else row


def _whole(given: Arguments, module: nn.Module, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors in what the module returns."""
    leaves = pytree.tree_leaves(given.call(module, *map(torch.clone, tensors)))
    return [value for value in leaves if isinstance(value, torch.Tensor)]


def _composed(cut: Cut, given: Arguments, module: nn.Module, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns what the stages return, one after another."""
    passed: Sequence[torch.Tensor] = ()
    try:
        for number in range(len(cut.starts)):
            stage = cut.stage(number)
            stage.given = given
            passed = stage(*passed, **{str(place): tensor.clone() for place, tensor in enumerate(tensors)})
    except Exception as error:
        raise _differ(module, f"fail{line_of_user(error)}: {type(error).__name__}: {error}") from error
    return list(passed)


def _gradients(outputs: Sequence[torch.Tensor], trained: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Returns the gradients of the outputs' squares; zeros where there are none."""
    losses = [output.float().square().sum() for output in outputs if output.requires_grad]
    found = torch.autograd.grad(losses, trained, allow_unused=True) if losses else [None] * len(trained)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]


def _differ(module: nn.Module, what: str) -> ModuleError:
    name = type(module).__name__
    return ModuleError(f"the stages of {name}, one after another, {what}", hint=HOW, param="module", code="ST-PIPELINE")


def _close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are equal up to a part of the largest number in each."""
    for a, b in zip(one, other, strict=True):
        rounding = 8 * torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
        tolerance = max(_TOLERANCE, rounding)
        a, b = a.detach().double().nan_to_num(), b.detach().double().nan_to_num()
        if a.shape != b.shape or (a.numel() and (a - b).abs().max() > tolerance * a.abs().max().clamp(min=1e-6)):
            return False
    return True
