"""The check of a plan: with its layers divided, a module returns what it returned before, with the same gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.devices import free_bytes, is_host, module_of
from sparktorch.errors import ClusterError, ModuleError, refusing
from sparktorch.train.numerics.determinism import seed_all, untouched_generators
from sparktorch.train.sharding.dtensor import TENSOR, local, undivided
from sparktorch.train.tensor_parallel.row_exchange import RowExchange

__all__ = ["Comparison", "as_before", "check_gradients", "emptied", "filled", "in_evaluation", "moved"]

_log = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_DEVICE_SHARE = 0.7  # The rest is for activations of a few rows, and a gradient at a time.
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
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        group: dist.ProcessGroup,
        exchange: RowExchange | None = None,
        device: torch.device = _HOST,
    ) -> None:
        """Calls the undivided module with the rows of all ranks of the group that will share its layers.

        Only the first of these ranks calls it, on `device`; the others wait for what it sends them. If it fails on an
        accelerator, nothing is compared. `exchange` exchanges rows with them, if each rank has rows of its own, and not
        all the same.
        """
        self._args, self._kwargs, self._group = args, kwargs, group
        floats = {p.dtype for p in module.parameters() if p.is_floating_point()}
        self._tolerance = max([_TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in floats)])
        self._zeros = filled(module)
        try:
            self._outputs, self._norms = self._from_first_rank(module, exchange, device)
        except Exception:
            emptied(module, self._zeros)
            raise

    def _from_first_rank(
        self, module: nn.Module, exchange: RowExchange | None, device: torch.device
    ) -> tuple[list[tuple[torch.Tensor, float]], dict[str, float]]:
        """Returns this rank's rows of each output with the largest usual number of all rows, and norms of gradients.

        They are empty where nothing is compared. A collective of the ranks that share layers.
        """
        is_first, size = self._group.rank() == 0, self._group.size()
        outputs, norms, drawn = list[torch.Tensor](), dict[str, float](), False
        unfit = ""

        def of_all_rows() -> Any:
            nonlocal drawn
            given = (self._args, self._kwargs)
            every = given if exchange is None else exchange.before(module, *given)
            try:
                if not is_first:
                    return ()
                if unfit:
                    raise ClusterError(unfit)
                args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), every)
                before = _generators(device)
                returned = module(*args, **kwargs)
                drawn = not all(map(torch.equal, before, _generators(device)))
                return returned
            finally:
                if exchange is not None:
                    exchange.restore()  # before `_passed` gives this rank its generators back

        try:
            with ExitStack() as placed:
                try:
                    placed.enter_context(moved(module, device) if is_first else nullcontext())
                except Exception as error:  # The rows are exchanged first, as other ranks do.
                    unfit = str(error)
                norms = placed.enter_context(_norms_of_gradients(module))
                outputs = _passed(module, of_all_rows)
        except Exception as error:
            if not is_first or is_host(device):
                raise
            _log.warning("the plan is not compared with the undivided module, which fails on %s: %s", device, error)
            norms.clear()
        parts = [[output] * size if exchange is None else exchange.split(output) for output in outputs]
        sizes = (output[_usual(output)].abs() for output in outputs)
        scales = [float(size.max()) if size.numel() else 0.0 for size in sizes]
        compared = {} if drawn else norms
        sent = [([*zip(of_rank, scales, strict=True)], compared) for of_rank in zip(*parts, strict=True)]
        received: list[Any] = [None]
        dist.scatter_object_list(
            received, (sent or [([], {})] * size) if is_first else None, group=self._group, group_src=0
        )
        return received[0]  # type: ignore[no-any-return]

    def check(self, module: nn.Module, complete: Callable[[], None]) -> bool:
        """Calls the module, whose layers are divided now, and which exchanges rows itself, on its arguments' device.

        `complete` completes the gradients of this rank. A `ModuleError` says that the module fails, returns something
        else, or has other gradients.

        Returns:
            Whether it was compared, the same in all ranks: not if it draws numbers in evaluation, or returns nothing
            there that has a gradient.
        """
        if not self._norms:
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
        pairs = zip(outputs, self._outputs, strict=False)
        if len(outputs) != len(self._outputs) or not all(self._close(one, *other) for one, other in pairs):
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

    def _close(self, one: torch.Tensor, other: torch.Tensor, largest: float) -> bool:
        """Whether outputs of this rank's rows are equal, but for rounding beside the largest number of all rows."""
        if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
            return False
        one, other = one.nan_to_num(), other.nan_to_num()
        return not ((one - other).abs() > self._tolerance * other.abs().clamp(min=largest)).any()


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


def _generators(device: torch.device) -> list[torch.Tensor]:
    """Returns the states of the generators of the host and of a device."""
    of_device = [] if is_host(device) else [module_of(device).get_rng_state(device)]
    return [torch.get_rng_state(), *of_device]


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
