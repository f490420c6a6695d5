"""Whether a module computes the same when it is divided: in parts of layers, or in stages."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.devices import free_bytes, is_host, module_of
from sparktorch.errors import ClusterError, ModuleError, refusing
from sparktorch.train.numerics.determinism import seed_all, untouched_generators
from sparktorch.train.sharding.arguments import Arguments
from sparktorch.train.sharding.dtensor import TENSOR, local, undivided

__all__ = [
    *("Comparison", "Results", "as_before", "emptied", "filled", "in_evaluation", "is_fake", "moved", "results_of"),
    "tolerance_of",
]

_log = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_DEVICE_SHARE = 0.7  # The rest is for activations of a row, and a gradient at a time.
_MASKS = 1e4  # what is beyond may stand for minus infinity
_TOLERANCE = 1e-2  # of the largest number: wrong plans make differences of its own size
_HINT = (
    "in strategyParams.plan, a 'rowwise' layer takes what a 'colwise' one returns, and functions between them take "
    "each number, or each head of a fixed size, by itself; what takes all numbers needs 'colwise_gather_output', and "
    "parameters between divided layers 'sum_gradients'"
)


@dataclass(frozen=True)
class Results:
    """What a module has computed.

    Attributes:
        outputs: Its numbers that may have a gradient, on the host.
        norms: The norm of the gradient of each parameter by name.
        drawn: Whether it has drawn random numbers.
    """

    outputs: list[torch.Tensor]
    norms: dict[str, float]
    drawn: bool = False

    def difference(self, other: Results, tolerance: float) -> str:
        """Returns what `other`, of a divided module, does otherwise; an empty text if it computes the same.

        `tolerance` is relative to the largest number of an output, and to the norm of a gradient.
        """
        pairs = zip(self.outputs, other.outputs, strict=False)
        if len(self.outputs) != len(other.outputs) or not all(_close(*pair, tolerance) for pair in pairs):
            return "returns something else"
        largest = max(filter(math.isfinite, self.norms.values()), default=0.0)
        for name in {**self.norms, **other.norms}:
            norm, wanted = other.norms.get(name, 0.0), self.norms.get(name, 0.0)
            if math.isfinite(wanted) and not abs(norm - wanted) <= tolerance * wanted + 1e-4 * largest:
                return f"has another gradient of {name!r}"
        return ""


def results_of(module: nn.Module, call: Callable[[], Any]) -> Results:
    """Calls a function, which calls a module or its stages under one seed, and runs backward; it leaves no gradients.

    Of modules without values, the outputs have none either, and no gradients are computed.
    """
    with _norms_of_gradients(module) as norms:
        outputs, drawn = _passed(module, call)
    return Results(outputs, norms, drawn)


class Comparison:
    """What a module computes for a row, before its layers are divided.

    The module is in evaluation, as dropout would draw other numbers for a part. Parameters that are zero are `filled`
    until the comparison is made.
    """

    def __init__(self, module: nn.Module, given: Arguments, group: dist.ProcessGroup, device: torch.device) -> None:
        """Calls the undivided module in the first of the ranks that will share its layers, on `device`.

        It is a collective of these ranks, in which the first one sends the others what it has computed. If it fails on
        an accelerator, nothing is compared.
        """
        self._given, self._group = given.to(device), group
        self._tolerance = tolerance_of(module, _TOLERANCE)
        self._zeros = filled(module)
        try:
            sent: list[Any] = [self._undivided(module, device) if group.rank() == 0 else None]
            dist.broadcast_object_list(sent, group=group, group_src=0)
        except Exception:
            emptied(module, self._zeros)
            raise
        self._expected: Results | None = sent[0]

    def _undivided(self, module: nn.Module, device: torch.device) -> Results | None:
        """Returns what the undivided module computes; `None` where that cannot be compared."""
        try:
            with moved(module, device), in_evaluation(module), torch.enable_grad():
                results = results_of(module, partial(self._given.call_again, module))
        except Exception as error:
            if is_host(device):
                raise
            _log.warning("the plan is not compared with the undivided module, which fails on %s: %s", device, error)
            return None
        return None if results.drawn or not results.norms else results

    def check(self, module: nn.Module, complete: Callable[[], None]) -> None:
        """Calls the module, whose layers are divided now.

        `complete` completes the gradients of this rank. A `ModuleError` says that the module fails, returns something
        else, or has other gradients. Nothing is compared if it draws numbers in evaluation, or returns nothing there
        that has a gradient.
        """
        if self._expected is None:
            emptied(module, self._zeros)
            return
        fails, about = f"{type(module).__name__}, with its layers divided,", {"param": "strategyParams"}
        with (
            refusing(f"{fails} fails", _HINT, **about, code="ST-TENSOR-PARALLEL"),
            in_evaluation(module),
            torch.enable_grad(),
        ):
            outputs, _ = _passed(module, partial(self._given.call_again, module))
            complete()
        results = Results(outputs, self._norms(module))
        emptied(module, self._zeros)
        difference = self._expected.difference(results, self._tolerance)
        if difference:
            what = f"{fails} {difference} than the undivided one"
            raise ModuleError(what, hint=_HINT, **about, code="ST-TENSOR-PARALLEL")

    def _norms(self, module: nn.Module) -> dict[str, float]:
        """Returns the norms of the gradients of all ranks' parts by name, and drops the gradients; a collective."""
        gradients = {name: local(p.grad) for name, p in module.named_parameters() if p.grad is not None}
        parts = torch.stack([torch.linalg.vector_norm(gradient).float() for gradient in gradients.values()])
        squares = parts.square()
        dist.all_reduce(squares, group=self._group)
        norms = {}
        for name, part, whole in zip(gradients, parts.tolist(), squares.sqrt().tolist(), strict=True):
            norms[name] = part if undivided(module.get_parameter(name), TENSOR) else whole
        for parameter in module.parameters():
            parameter.grad = None
        return norms


def tolerance_of(module: nn.Module, least: float) -> float:
    """Returns how far numbers may differ by rounding in the dtypes of a module, relative to the largest one."""
    floats = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return max([least, *(8 * torch.finfo(dtype).eps for dtype in floats)])


def _close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether outputs are equal, but for rounding beside the largest number that is no mask."""
    if one.shape != other.shape or is_fake([one]):
        return one.shape == other.shape
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    sizes = one[_usual(one)].abs()
    largest = float(sizes.max()) if sizes.numel() else 0.0
    one, other = one.nan_to_num(), other.nan_to_num()
    return not ((one - other).abs() > tolerance * one.abs().clamp(min=largest)).any()


def _usual(values: torch.Tensor) -> torch.Tensor:
    """Returns where values are no masks, such as -inf or -1e9: up to a bound, or all finite ones if none is."""
    usual = values.detach().abs() <= _MASKS
    return usual if usual.any() else values.detach().isfinite()


def is_fake(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor has no values."""
    from torch._subclasses import FakeTensor

    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


@torch.no_grad()
def filled(module: nn.Module) -> list[str]:
    """Gives parameters that are zero, as of a head, other values, or they would hide what is before them.

    Returns their names, for `emptied`.
    """
    zeros = {name: p for name, p in module.named_parameters() if p.is_floating_point() and not p.any()}
    with untouched_generators(_device_of(module)):
        seed_all(0)
        for parameter in zeros.values():
            parameter.uniform_(-0.1, 0.1)
    return list(zeros)


@torch.no_grad()
def emptied(module: nn.Module, names: Iterable[str]) -> None:
    """Makes parameters that `filled` has given values zero again; they may be divided meanwhile."""
    for name in names:
        local(module.get_parameter(name)).zero_()


@contextmanager
def as_before(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Context after which modes and buffers are as before; yields the buffers' values by name."""
    modes = {part: part.training for part in module.modules()}
    buffers = [(name, buffer, buffer.clone()) for name, buffer in module.named_buffers()]
    try:
        yield {name: value for name, _, value in buffers}
    finally:
        for part, mode in modes.items():
            part.training = mode
        with torch.no_grad():
            for _, buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """Context of a call in evaluation, after which modes, buffers and generators are as before."""
    cudnn: Any = torch.backends.cudnn  # whose recurrent layers have no gradients in evaluation
    enabled, cudnn.enabled = cudnn.enabled, False
    try:
        with as_before(module), untouched_generators(_device_of(module)), torch.compiler.set_stance("force_eager"):
            module.eval()
            yield
    finally:
        cudnn.enabled = enabled


@contextmanager
def moved(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which a module of the host lies on a device; raises a `ClusterError` if it does not fit there."""
    size = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
    if not is_host(device) and size > free_bytes(str(device)) * _DEVICE_SHARE:
        raise ClusterError(f"it has {size:,} bytes, more than {_DEVICE_SHARE:.0%} of what is free there")
    try:
        module.to(device)
        yield
    finally:
        module.to(_HOST)


@contextmanager
def _norms_of_gradients(module: nn.Module) -> Iterator[dict[str, float]]:
    """Context of backward passes; yields the norm of each gradient by name, which is dropped once it is known."""
    norms: dict[str, float] = {}

    def keep(name: str, parameter: Any) -> None:
        norms[name] = float(torch.linalg.vector_norm(parameter.grad))
        parameter.grad = None  # No rank has all gradients at once.

    hooks: list[Any] = [
        p.register_post_accumulate_grad_hook(partial(keep, name))  # type: ignore[no-untyped-call]  # torch's
        for name, p in module.named_parameters()
        if p.requires_grad
    ]
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()


def _state_of_generators(device: torch.device) -> Any:
    """Returns a value that is another one once a number has been drawn, on the host or on a device."""
    of_device = [] if is_host(device) else [module_of(device).get_rng_state(device)]
    _, keys, *place = np.random.get_state()
    torchs = [state.numpy().tobytes() for state in (torch.get_rng_state(), *of_device)]
    return random.getstate(), np.asarray(keys).tobytes(), place, torchs


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _passed(module: nn.Module, call: Callable[[], Any]) -> tuple[list[torch.Tensor], bool]:
    """Runs forward and backward; returns the outputs, on the host, and whether random numbers were drawn."""
    if is_fake(module.parameters()):
        return [leaf for leaf in pytree.tree_leaves(call()) if isinstance(leaf, torch.Tensor)], False
    device = _device_of(module)
    with untouched_generators(device):
        seed_all(0)
        before = _state_of_generators(device)
        leaves = [leaf for leaf in pytree.tree_leaves(call()) if isinstance(leaf, torch.Tensor)]
        drawn = before != _state_of_generators(device)
        outputs = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
        losses = [output[_usual(output)].abs().float().square().sum() for output in outputs if output.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    return [output.detach().cpu() for output in outputs], drawn
