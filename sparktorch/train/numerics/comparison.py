"""Whether a module that is divided, in parts of layers or in stages, computes what it computes undivided."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.train.numerics.determinism import generators_state, seed_all, untouched_generators
from sparktorch.train.sharding.dtensor import local

__all__ = ["Results", "in_mode", "is_fake", "norms_of_gradients", "results_of"]

_TOLERANCE = 1e-2  # Wrong divisions make differences of the size of the numbers themselves.


@dataclass(frozen=True)
class Results:
    """What a module has computed in evaluation.

    Attributes:
        outputs: Its numbers that may have a gradient, on the host; of a module without values, all tensors.
        norms: The norm of the gradient of each parameter by name.
        tolerance: How far others may differ by rounding, relative to the largest number of an output, and to a norm.
        is_random: Whether it has drawn random numbers: a divided module draws others, so that nothing can be compared.
    """

    outputs: list[torch.Tensor]
    norms: dict[str, float]
    tolerance: float
    is_random: bool = False

    def difference(self, other: Results) -> str:
        """Returns what `other`, of the divided module, does otherwise; an empty text if it computes the same."""
        same_number = len(self.outputs) == len(other.outputs)
        if not same_number or not all(map(self._close, self.outputs, other.outputs)):
            return "returns something else"
        largest = max(filter(math.isfinite, self.norms.values()), default=0.0)
        for name in {**self.norms, **other.norms}:
            norm, expected = other.norms.get(name, 0.0), self.norms.get(name, 0.0)
            bound = self.tolerance * expected + 1e-4 * largest
            if math.isfinite(expected) and not abs(norm - expected) <= bound:
                return f"has another gradient of {name!r}"
        return ""

    def _close(self, expected: torch.Tensor, output: torch.Tensor) -> bool:
        """Whether outputs are equal, but for rounding; such as -inf are equal to themselves alone."""
        if expected.shape != output.shape or is_fake([expected]):
            return expected.shape == output.shape
        finite = expected.isfinite()
        if not torch.equal(finite, output.isfinite()):
            return False
        expected, output = expected[finite], output[finite]
        bound = self.tolerance * expected.abs().max() if expected.numel() else 0
        return not ((expected - output).abs() > bound).any()


def results_of(
    module: nn.Module,
    call: Callable[[], Any],
    norms_of: Callable[[nn.Module], dict[str, float]],
) -> Results:
    """Calls a function, which calls a module or its stages, in evaluation and under one seed, and runs backward.

    The outputs are multiplied by numbers that differ, so that no gradient is the same for sums of other outputs, and
    that of a head of zeros tells what is before it. Modes, generators and gradients are as before. Of a module without
    values, the outputs have none either, and there are no gradients.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    with _in_evaluation(module, device):
        if is_fake(module.parameters()):
            return Results(_tensors_of(call()), {}, _TOLERANCE)
        before = pytree.tree_leaves(generators_state(device))
        tensors = _tensors_of(call())
        after = pytree.tree_leaves(generators_state(device))
        is_random = not all(map(_is_same, before, after))
        outputs = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        differentiable = [output for output in outputs if output.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [_factors_like(output) for output in differentiable])
    norms = norms_of(module)
    for parameter in module.parameters():
        parameter.grad = None
    floats = {p.dtype for p in module.parameters() if p.is_floating_point()}
    tolerance = max([_TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in floats)])
    return Results([output.detach().cpu() for output in outputs], norms, tolerance, is_random)


def _is_same(value: Any, other: Any) -> bool:
    return torch.equal(value, other) if isinstance(value, torch.Tensor) else bool(value == other)


def _tensors_of(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def norms_of_gradients(module: nn.Module) -> dict[str, float]:
    """Returns the norms of the gradients in this rank by name."""
    gradients = {name: local(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    return {name: float(torch.linalg.vector_norm(gradient)) for name, gradient in gradients.items()}


def is_fake(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor has no values."""
    from torch._subclasses import FakeTensor

    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


def _factors_like(output: torch.Tensor) -> torch.Tensor:
    """Returns a number for each of an output: from 0.5 to 1.5."""
    return torch.linspace(0.5, 1.5, output.numel(), device=output.device).to(output.dtype).view(output.shape)


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Context in which a module is in training or in evaluation, after which all its parts are as before."""
    modes = {part: part.training for part in module.modules()}
    try:
        module.train(training)
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def _in_evaluation(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context of a call in evaluation, with gradients, after which modes and generators are as before."""
    cudnn: Any = torch.backends.cudnn  # Its recurrent layers have no gradients in evaluation.
    enabled, cudnn.enabled = cudnn.enabled, False
    try:
        with (
            in_mode(module, training=False),
            untouched_generators(device),
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            seed_all(0)
            yield
    finally:
        cudnn.enabled = enabled
