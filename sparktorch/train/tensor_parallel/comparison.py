"""The check of a plan: with its layers divided, a module returns what it returned before, with the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.errors import ModuleError, refusing
from sparktorch.train.numerics.determinism import seed_all, untouched_generators
from sparktorch.train.sharding.dtensor import TENSOR, local, undivided
from sparktorch.train.tensor_parallel.row_exchange import RowExchange

__all__ = ["Comparison", "as_before", "check_gradients", "emptied", "filled", "in_evaluation"]

_MASKS = 1e4  # what is beyond may stand for minus infinity
_TOLERANCE = 1e-2  # of the largest number: wrong plans make differences of its own size
_HINT = (
    "in strategyParams.plan, a 'rowwise' layer takes what a 'colwise' one returns, and functions between them take "
    "each number, or each head of a fixed size, by itself; what takes all numbers needs 'colwise_gather_output', and "
    "parameters between divided layers 'sum_gradients'"
)


class Comparison:
    """Outputs and gradients of a module on a few rows, before its layers are divided.

    The module is in evaluation, as dropout would draw other numbers for a part. Parameters that are zero are `filled`
    until the comparison is made.
    """

    def __init__(
        self, module: nn.Module, args: Any, kwargs: Any, group: dist.ProcessGroup, exchange: RowExchange | None = None
    ) -> None:
        """Calls the undivided module, on the host, with the rows of all ranks of the group that will share its layers.

        `exchange` exchanges rows with them, if each rank has rows of its own, and not all the same.
        """
        self._args, self._kwargs, self._group, self._exchange = args, kwargs, group, exchange
        floats = {p.dtype for p in module.parameters() if p.is_floating_point()}
        self._tolerance = max([_TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in floats)])
        self._zeros = filled(module)
        self._norms: dict[str, float] = {}
        self._drawn = False

        def keep(name: str, parameter: Any) -> None:
            self._norms[name] = float(torch.linalg.vector_norm(parameter.grad))
            parameter.grad = None  # no rank has all gradients at once

        def of_all_rows() -> Any:
            every = (args, kwargs) if exchange is None else exchange.before(module, args, kwargs)
            try:
                args_of_all, kwargs_of_all = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, every)
                before = torch.get_rng_state()
                returned = module(*args_of_all, **kwargs_of_all)
                self._drawn = not torch.equal(before, torch.get_rng_state())
                return returned
            finally:
                if exchange is not None:
                    exchange.restore()  # before `_passed` gives this rank its generators back

        hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(partial(keep, name))  # type: ignore[no-untyped-call]  # torch's
            for name, p in module.named_parameters()
            if p.requires_grad
        ]
        try:
            self._outputs = _passed(module, of_all_rows)
        except Exception:
            emptied(module, self._zeros)
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def check(self, module: nn.Module, complete: Callable[[], None]) -> bool:
        """Calls the module, whose layers are divided now, and which exchanges rows itself, on its arguments' device.

        `complete` completes the gradients of this rank. A `ModuleError` says that the module fails, returns something
        else, or has other gradients.

        Returns:
            Whether it was compared, the same in all ranks: not if it draws numbers in evaluation, or returns nothing
            there that has a gradient.
        """
        if self._drawn or not self._norms:
            emptied(module, self._zeros)
            return False
        with refusing(
            f"{type(module).__name__}, with its layers divided, fails",
            _HINT,
            param="strategyParams",
            code="ST-TENSOR-PARALLEL",
        ):
            outputs = _passed(module, lambda: module(*self._args, **self._kwargs))
            complete()
        own = self._exchange.own if self._exchange is not None else torch.Tensor.detach
        pairs = zip(outputs, self._outputs, strict=False)
        if len(outputs) != len(self._outputs) or not all(self._close(one, own(other), other) for one, other in pairs):
            raise _differs(module, "returns something else than the undivided one")
        norms = {n: torch.linalg.vector_norm(local(p.grad)) for n, p in module.named_parameters() if p.grad is not None}
        squares = torch.stack([norms[name].float().square() for name in sorted(norms)])
        dist.all_reduce(squares, group=self._group)  # of parts; others have no need of it
        total = dict(zip(sorted(norms), squares.sqrt().tolist(), strict=True))
        largest = max(filter(math.isfinite, self._norms.values()), default=0.0)
        emptied(module, self._zeros)
        for name, parameter in module.named_parameters():
            found = float(norms.get(name, 0.0)) if undivided(parameter, TENSOR) else total.get(name, 0.0)
            wanted = self._norms.get(name, 0.0)
            parameter.grad = None
            if math.isfinite(wanted) and not abs(found - wanted) <= self._tolerance * wanted + 1e-4 * largest:
                raise _differs(module, f"has another gradient of {name!r} than the undivided one")
        return True

    def _close(self, one: torch.Tensor, other: torch.Tensor, of_all: torch.Tensor) -> bool:
        """Whether outputs of this rank's rows are equal, but for rounding beside those of all rows."""
        if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
            return False
        one, other, sizes = one.nan_to_num(), other.nan_to_num(), of_all[_usual(of_all)].abs()
        scale = other.abs().clamp(min=float(sizes.max()) if sizes.numel() else 0.0)
        return not ((one - other).abs() > self._tolerance * scale).any()


def check_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Compares gradients of what is not divided between the ranks that share layers, where no module was compared."""
    named = {n: local(p.grad) for n, p in module.named_parameters() if p.grad is not None and undivided(p, TENSOR)}
    if not named:
        return
    far, sizes = [], []
    for own in named.values():
        mean = own.float() / group.size()
        dist.all_reduce(mean, group=group)
        far.append((own - mean).norm())
        sizes.append(mean.norm())
    distances, norms = torch.stack(far), torch.stack(sizes)
    dist.all_reduce(distances, dist.ReduceOp.MAX, group=group)
    wrong = distances > _TOLERANCE * norms + 1e-5 * norms.max()
    if wrong.any():
        name = list(named)[int(wrong.nonzero()[0])]
        raise ModuleError(
            f"the gradient of {name!r} differs between ranks that share layers: it is used with a divided output",
            hint=f"add {name.rpartition('.')[0]!r}: 'sum_gradients' to strategyParams.plan, or gather the output",
            param="strategyParams",
            code="ST-TENSOR-PARALLEL",
        )


def _usual(values: torch.Tensor) -> torch.Tensor:
    """Returns where values are no masks, such as -inf or -1e9: up to a bound, or all finite ones if none is."""
    usual = values.detach().abs() <= _MASKS
    return usual if usual.any() else values.detach().isfinite()


def _differs(module: nn.Module, what: str) -> ModuleError:
    what = f"{type(module).__name__}, with its layers divided, {what}"
    return ModuleError(what, hint=_HINT, param="strategyParams", code="ST-TENSOR-PARALLEL")


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
    """Context of a call in evaluation, under one seed, after which modes, buffers and generators are as before."""
    cudnn: Any = torch.backends.cudnn  # whose recurrent layers have no gradients in evaluation
    enabled, cudnn.enabled = cudnn.enabled, False
    try:
        with as_before(module), untouched_generators(_device_of(module)), torch.compiler.set_stance("force_eager"):
            module.eval()
            seed_all(0)
            yield
    finally:
        cudnn.enabled = enabled


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _passed(module: nn.Module, call: Callable[[], Any]) -> list[torch.Tensor]:
    """Runs forward and backward; returns the outputs, on the host."""
    with in_evaluation(module), torch.enable_grad():
        leaves = [leaf for leaf in pytree.tree_leaves(call()) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
        losses = [output[_usual(output)].abs().float().square().sum() for output in outputs if output.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    return [output.detach().cpu() for output in outputs]
