"""How `DistributedDataParallel` gets gradients that its own hooks would miss, or would send too early."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparktorch.errors import ConfigError, UnusedParameterError
from sparktorch.train.recipe.recipe import makes_sparse_gradients
from sparktorch.train.strategies.base import GradientsOfRows

__all__ = ["DDPGradients", "call_instead", "parameters_with_sparse_gradients"]


class DDPGradients(GradientsOfRows):
    """Has DDP reduce the gradients of a step in its last pass, or in a pass of zeros after it.

    That is where a rank has no rows, where the last pass does not reach a parameter, and where a gradient is sparse,
    which DDP takes for missing.
    """

    warm_up_passes = 2  # Buckets are rebuilt after the first backward pass (pytorch#35137).

    def __init__(
        self, module: DistributedDataParallel, divisor: int, *, searches: bool, static_graph: bool, in_users_loop: bool
    ) -> None:
        """Takes DDP, and whether it searches for parameters that a step does not use."""
        super().__init__(module.module, divisor)
        self._ddp, self._searches, self._static, self._device = module, searches, static_graph, module.device
        self._trained = {p: name for name, p in module.module.named_parameters() if p.requires_grad}
        self._sparse = parameters_with_sparse_gradients(module)
        self._compares = not (in_users_loop or searches or static_graph)
        self._before: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}  # They are gradients, and their versions.
        self.discards = self._reduces_apart(rows=False)
        self._sends: bool | None = None  # After a pass without rows, it says whether DDP's next pass sends buffers.

    def backward(self, loss: torch.Tensor, *, rows: bool) -> None:
        """Runs the backward pass; of placeholder rows, it leaves no gradients."""
        if not rows and self.discards and self._searches:  # DDP counts a parameter as used once it has a gradient.
            trained = [parameter for parameter in self._trained if parameter.requires_grad]  # A callback freezes some.
            torch.autograd.grad(loss, trained, allow_unused=True)
        else:
            super().backward(loss, rows=rows)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context without the all-reduce."""
        with self._ddp.no_sync():
            yield
        # What the last pass of a step does not reach still has the gradients of those before.
        if self._compares:
            self._before = {p: (p.grad, p.grad._version) for p in self._trained if p.grad is not None}

    @contextmanager
    def reducing(self, *, rows: bool, warm_up: bool = False) -> Iterator[None]:
        """Context of the last pass, which reduces gradients, or in which `reduce` follows.

        Raises:
            ConfigError: A hook has frozen a parameter, and torch expects the gradients of the first step in each.
        """
        frozen = [name for p, name in self._trained.items() if not p.requires_grad] if self._static else []
        if frozen:
            raise ConfigError(
                f"a hook has frozen {frozen[0]!r}, and strategyParams.static_graph says that all steps use the same "
                "parameters",
                hint="leave static_graph out",
                param="strategyParams",
                code="ST-STRATEGY",
            )
        if not self._reduces_apart(rows=rows):
            yield
            self._end_reduction(rows=rows and not warm_up)
            return
        module = self._ddp
        with self.no_sync(), nullcontext() if warm_up else _sending_buffers(module):
            yield
        if not warm_up:  # The pass has sent buffers as that of a rank that reduces in it does.
            self._sends, module.require_forward_param_sync = module.require_forward_param_sync, False
        self.reduce(rows=rows and not warm_up)

    def before_trial(self) -> None:
        """Sends buffers, and once the order of the buckets, as DDP's first forward pass of a step does."""
        with self._ddp.no_sync():
            self._pass_nothing()

    def reduce(self, *, rows: bool = True) -> None:
        """Has DDP reduce the gradients, as after a backward pass through the whole module."""
        self._before = {}
        missing = [parameter for parameter in self._trained if parameter.grad is None]
        self._pass_nothing().backward()  # type: ignore[no-untyped-call]
        if self._sends is not None:
            self._ddp.require_forward_param_sync = self._sends
            self._sends = None
        self._settle(missing, rows=rows)

    def _reduces_apart(self, *, rows: bool) -> bool:
        """Whether `reduce` is to follow the passes: without rows, and where DDP would miss a sparse gradient."""
        return bool(self._sparse) or not (rows or self._static)

    def _end_reduction(self, *, rows: bool) -> None:
        """Ends the reduction, where the last pass has not reached all parameters: the other ranks wait for them."""
        if self._searches or self._static:
            return
        before, self._before = self._before, {}
        unreached = [p for p in self._trained if p.grad is None or (p in before and _same(p.grad, *before[p]))]
        if unreached:
            missing = [parameter for parameter in unreached if parameter.grad is None]
            self._nothing(unreached).backward()  # type: ignore[no-untyped-call]
            self._settle(missing, rows=rows)

    def _pass_nothing(self) -> torch.Tensor:
        """Calls DDP in place of a forward pass that uses all parameters."""
        nothing: torch.Tensor = call_instead(self._ddp, partial(self._nothing, self._trained))
        return nothing

    def _nothing(self, parameters: Collection[nn.Parameter]) -> torch.Tensor:
        """Returns a zero whose backward pass tells DDP that these parameters get no more gradients."""
        empty = [_no_rows(p) if p in self._sparse and p.grad is None else None for p in parameters]
        nothing = torch.zeros((), device=self._device, requires_grad=True)
        with self._unfrozen():
            zero: torch.Tensor = _NoGradients.apply(empty, nothing, *parameters)  # type: ignore[no-untyped-call]
        return zero

    @contextmanager
    def _unfrozen(self) -> Iterator[None]:
        """Context in which autograd reaches parameters that a callback has frozen, for which DDP's reducer waits."""
        frozen = [] if self._searches else [parameter for parameter in self._trained if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def _settle(self, missing: Sequence[nn.Parameter], *, rows: bool) -> None:
        """Takes the gradients, all zero, of parameters that no rank has used; only a search tells which these are."""
        for parameter in missing:
            gradient = parameter.grad
            if gradient is None:
                continue
            if not parameter.requires_grad:
                parameter.grad = None
            elif gradient.is_sparse:  # Its indices tell.
                parameter.grad = gradient if gradient._nnz() else None
            elif rows and not self._searches and not gradient.any():
                raise UnusedParameterError(
                    f"parameter {self._trained[parameter]!r} got no gradient in a step",
                    hint="set strategyParams={'find_unused_parameters': True}",
                    param="strategyParams",
                )


def call_instead(module: DistributedDataParallel, function: Callable[[], Any]) -> Any:
    """Calls DDP with a function in place of the module's forward pass, and returns the function's result."""
    plain = module.module
    module.module = _Calling(plain, function)
    try:
        return module(torch.zeros((), device=module.device))
    finally:
        module.module = plain


def parameters_with_sparse_gradients(module: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters of the parts that make sparse gradients."""
    makers = [part for part in module.modules() if makes_sparse_gradients(part)]
    return {parameter for part in makers for parameter in part.parameters(recurse=False)}


class _Calling(nn.Module):
    """Calls a function, and ignores its argument."""

    def __init__(self, plain: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.plain = plain  # DDP looks for its buffers.
        self._function = function

    def forward(self, _: torch.Tensor) -> Any:
        return self._function()


class _NoGradients(torch.autograd.Function):
    """The second argument; parameters that follow get the gradients in the first one, `None` for none."""

    @staticmethod
    def forward(
        ctx: Any, gradients: Sequence[torch.Tensor | None], nothing: torch.Tensor, *_: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return nothing.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.gradients


def _no_rows(table: nn.Parameter) -> torch.Tensor:
    """Returns the gradient of a table of shape `(rows, ...)` of which no row was looked up."""
    index = torch.empty((1, 0), dtype=torch.int64, device=table.device)
    values = table.new_empty((0, *table.shape[1:]))
    return torch.sparse_coo_tensor(index, values, table.shape, check_invariants=False)


@contextmanager
def _sending_buffers(module: DistributedDataParallel) -> Iterator[None]:
    """Context in which every forward pass but the first sends buffers, as one does whose gradients are reduced."""

    def again(*_: Any) -> None:
        # Torch sets it so where gradients are reduced.
        module.require_forward_param_sync = torch.is_grad_enabled()

    with module.register_forward_hook(again):
        yield


def _same(gradient: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    """Whether nothing was added to a gradient since it had that version."""
    return gradient is before and gradient._version == version
