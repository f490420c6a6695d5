"""Data parallel: every rank holds the whole model, and gradients are all-reduced during backward.

Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training
(https://arxiv.org/abs/2006.15704).
"""

# No `from __future__ import annotations`: torch inspects the annotations of communication hooks.
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparktorch.base.config import TrainConfig, at_least, one_of
from sparktorch.base.devices import backend_of
from sparktorch.base.world import World
from sparktorch.errors import ConfigError, ModuleError, Refusal, UnusedParameterError
from sparktorch.train.recipe.recipe import makes_sparse_gradients
from sparktorch.train.strategies.base import Strategy

__all__ = ["DDP", "DDPOptions"]

_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")  # PowerSGD's state, by bucket index
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class DDPOptions:
    """Options of `ddp` and `zero1`; see `torch.nn.parallel.DistributedDataParallel`.

    Attributes:
        bucket_cap_mb: Size of gradient buckets in MB; 0 sends each gradient by itself. `None` is torch's default: 25,
            and 1 for the first bucket, so that sending starts early in backward.
        gradient_as_bucket_view: Whether gradients are views of the buckets, which saves a copy of them.
        static_graph: Whether every step uses the same parameters, in the same order.
        forward_sync_buffers: Whether rank 0 broadcasts its buffers before each forward pass.
        find_unused_parameters: Whether a step may leave parameters without a gradient in all ranks; `None` finds out.
        comm_hook: Sends gradients as "fp16" or "bf16", or compressed by "powerSGD".
        powersgd_rank: Rank of the low-rank matrices that PowerSGD sends.
        powersgd_start_step: Number of first steps in which PowerSGD sends uncompressed gradients.
    """

    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    forward_sync_buffers: bool = True
    find_unused_parameters: bool | None = None
    comm_hook: Literal["fp16", "bf16", "powerSGD"] | None = None
    powersgd_rank: int = 1
    powersgd_start_step: int = 1000

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None:
            at_least("strategyParams.bucket_cap_mb", self.bucket_cap_mb, 0)
        at_least("strategyParams.powersgd_rank", self.powersgd_rank, 1)
        at_least("strategyParams.powersgd_start_step", self.powersgd_start_step, 2)  # torch's own bound
        if self.comm_hook is not None:
            one_of("strategyParams.comm_hook", self.comm_hook, ("fp16", "bf16", "powerSGD"))


class DDP(Strategy[DDPOptions]):
    """`DistributedDataParallel`; a single rank uses the module unwrapped.

    A parameter that this rank's rows do not use in a step adds zeros to the gradient of the others. One that no rank
    uses gets no gradient, so that no optimizer changes it. Ranks can tell which those are only if DDP searches for them
    in every step (`find_unused_parameters`), which takes a tenth of a small step or more. So they search where the dry
    run has found such a parameter, or once a step has.
    """

    options_type = DDPOptions
    refusals = (
        Refusal(  # torch records the graph in the first backward pass, which must reduce gradients
            "strategyParams",
            lambda job: job.options.static_graph and job.in_micro_batches,
            "strategyParams.static_graph does not go together with micro-batches",
            "leave out static_graph, or accumulationSteps and microBatchSize",
        ),
    )
    warm_up_passes = 2  # buckets are rebuilt after the first backward (pytorch#35137)

    _compression: Any = None  # PowerSGD's state

    def __init__(self, config: TrainConfig, world: World, options: DDPOptions) -> None:
        """Takes the configuration, the rank's world, and the options."""
        super().__init__(config, world, options)
        asked = options.find_unused_parameters
        self.searches = config.unused_parameters if asked is None else asked
        self._trained: dict[nn.Parameter, str] = {}
        self._sparse: set[nn.Parameter] = set()
        self._before: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}  # gradients, and their versions
        self._sends: bool | None = None  # whether DDP's next pass sends buffers, after one without rows

    def prepare(self, module: nn.Module) -> nn.Module:
        """Wraps the module, and broadcasts rank 0's initial parameters and buffers."""
        if "nccl" in backend_of(self._world.device) and not self.alone:
            _refuse_sparse(module)
        tensors = [*module.parameters(), *module.buffers()]
        if any(tensor.device != self._device for tensor in tensors):  # a module without values cannot be moved
            module.to(self._device)
        if self.alone:
            return module
        options = self._options
        index = self._device.index
        self._trained = {p: name for name, p in module.named_parameters() if p.requires_grad}
        makers = [part for part in module.modules() if makes_sparse_gradients(part)]
        self._sparse = {p for part in makers for p in part.parameters(recurse=False)}
        self.searches = self.searches or bool(self._sparse)  # few rows look up a table
        wrapped = DistributedDataParallel(
            module,
            device_ids=None if index is None else [index],
            bucket_cap_mb=self._bucket_cap(module),
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            **_without_buffers(options),  # type: ignore[arg-type]
            find_unused_parameters=self.searches,
        )
        if options.comm_hook == "powerSGD":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

            state = powersgd.PowerSGDState(
                None,
                matrix_approximation_rank=options.powersgd_rank,
                start_powerSGD_iter=options.powersgd_start_step,
            )
            wrapped.register_comm_hook(state, powersgd.powerSGD_hook)
            self._compression = state
        elif options.comm_hook is not None:
            wrapped.register_comm_hook(_DTYPES[options.comm_hook], _narrow_all_reduce)
        return wrapped

    def _bucket_cap(self, module: nn.Module) -> float | None:
        """Returns the size of buckets in MB; with PowerSGD over Gloo, one bucket has room for all gradients.

        PowerSGD's hook makes three all-reduces per bucket, the later ones from Gloo's threads when the earlier ones
        are done. With several buckets, their order would differ between ranks, which is a deadlock.
        """
        options = self._options
        if options.comm_hook != "powerSGD" or not backend_of(self._world.device).endswith("gloo"):
            # Versions of torch before 2.13 refuse 0; no gradient fits beside another in one byte.
            return 1 / (1 << 20) if options.bucket_cap_mb == 0 else options.bucket_cap_mb
        if options.bucket_cap_mb is not None:
            raise ConfigError(
                "strategyParams.bucket_cap_mb does not go together with comm_hook='powerSGD' on CPUs",
                hint="leave it out: all gradients go in one bucket then",
                param="strategyParams",
            )
        return 1 + sum(parameter.nbytes for parameter in module.parameters()) / (1 << 20)

    def own_state(self) -> dict[str, torch.Tensor]:
        """Returns PowerSGD's step count and generator, and each bucket's error feedback and low-rank matrices."""
        if self._compression is None:
            return {}
        _, keys, place, *_ = self._compression.rng.get_state()
        found = {
            "steps": torch.tensor([self._compression.iter]),
            "generator": torch.tensor([*keys.tolist(), place]),
        }
        for name in _MEMORIES:
            for bucket, value in getattr(self._compression, name).items():
                found[f"{self._memory(name)}{bucket}"] = value
        return found

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores PowerSGD's state, without the buckets' tensors if the number of ranks or the options differ."""
        compression = self._compression
        if compression is None or "steps" not in state:
            return
        compression.iter = int(state["steps"])
        *keys, place = state["generator"].tolist()
        compression.rng.set_state(("MT19937", keys, place))
        for name in _MEMORIES:
            prefix = self._memory(name)
            values = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            setattr(compression, name, {int(key): value.to(self._world.device) for key, value in values.items()})

    def _memory(self, name: str) -> str:
        """Returns the name prefix of a memory's tensors, which has all settings that their shapes depend on."""
        options = self._options
        return f"{name}.{self._world.world_size}.{options.powersgd_rank}.{options.bucket_cap_mb}."

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Returns the wrapped module."""
        return module.module if isinstance(module, DistributedDataParallel) else module

    @contextmanager
    def no_sync(self, module: nn.Module, *, last: bool = False) -> Iterator[None]:
        """Context without the all-reduce; the last pass sends buffers as that of a rank that reduces in it does."""
        if not isinstance(module, DistributedDataParallel):
            yield
            return
        with module.no_sync(), _sending_buffers(module) if last else nullcontext():
            yield
        if last:  # `reduce` calls DDP once more
            self._sends, module.require_forward_param_sync = module.require_forward_param_sync, False
        # What the last pass of a step does not reach still has the gradients of those before.
        if not (self.in_users_loop or self.searches or self._options.static_graph):
            self._before = {p: (p.grad, p.grad._version) for p in self._trained if p.grad is not None}

    def reduces_apart(self, *, rows: bool) -> bool:
        """Whether `reduce` is to follow the passes: without rows, and where DDP would miss a sparse gradient."""
        return not self.alone and (bool(self._sparse) or not (rows or self._options.static_graph))

    def within_forward(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        """Calls the function in place of the module's forward pass, so that DDP prepares to reduce its gradients."""
        if not isinstance(module, DistributedDataParallel):
            return function()
        return self._pass(module, _Calling(module.module, function))

    def before_trial(self, module: nn.Module) -> None:
        """Sends buffers, and once the order of the buckets, as DDP's first forward pass of a step does."""
        if isinstance(module, DistributedDataParallel):
            with module.no_sync():
                self._pass_nothing(module)

    def reduce(self, module: nn.Module, *, rows: bool = True) -> None:
        """Has DDP reduce the gradients, as after a backward pass through the whole module."""
        self._before = {}
        if isinstance(module, DistributedDataParallel):
            missing = [parameter for parameter in self._trained if parameter.grad is None]
            self._pass_nothing(module).backward()  # type: ignore[no-untyped-call]
            if self._sends is not None:
                module.require_forward_param_sync = self._sends
                self._sends = None
            self._settle(missing, rows=rows)

    def after_backward(self, module: nn.Module, *, rows: bool) -> None:
        """Ends the reduction, where the last pass has not reached all parameters: the other ranks wait for them."""
        if not isinstance(module, DistributedDataParallel) or self.searches or self._options.static_graph:
            return
        before, self._before = self._before, {}
        unreached = [p for p in self._trained if p.grad is None or (p in before and _same(p.grad, *before[p]))]
        if unreached:
            missing = [parameter for parameter in unreached if parameter.grad is None]
            self._nothing(unreached).backward()  # type: ignore[no-untyped-call]
            self._settle(missing, rows=rows)

    def _nothing(self, parameters: Collection[nn.Parameter]) -> torch.Tensor:
        """Returns a zero whose backward pass tells DDP that these parameters get no more gradients."""
        empty = [_no_rows(p) if p in self._sparse and p.grad is None else None for p in parameters]
        nothing = torch.zeros((), device=self._device, requires_grad=True)
        found: torch.Tensor = _NoGradients.apply(empty, nothing, *parameters)  # type: ignore[no-untyped-call]
        return found

    def _settle(self, missing: Sequence[nn.Parameter], *, rows: bool) -> None:
        """Takes the gradients, all zero, of parameters that no rank has used in a step.

        Args:
            missing: Parameters that this rank has not used.
            rows: Whether it has rows in the step.

        Raises:
            UnusedParameterError: Only a search can tell whether a parameter is one of these.
        """
        for parameter in missing:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:  # its indices tell
                parameter.grad = gradient if gradient._nnz() else None
            elif rows and not self.searches and not gradient.any():
                raise UnusedParameterError(
                    f"parameter {self._trained[parameter]!r} got no gradient in a step",
                    hint="set strategyParams={'find_unused_parameters': True}",
                    param="strategyParams",
                )

    def _pass_nothing(self, module: DistributedDataParallel) -> torch.Tensor:
        """Calls DDP in place of a forward pass that uses all parameters."""
        nothing: torch.Tensor = self._pass(module, _Calling(module.module, lambda: self._nothing(self._trained)))
        return nothing

    def _pass(self, module: DistributedDataParallel, stand_in: nn.Module) -> Any:
        """Calls DDP with a stand-in for the module, and returns its result."""
        plain = module.module
        module.module = stand_in
        try:
            return module(torch.zeros((), device=self._device))
        finally:
            module.module = plain


class _Calling(nn.Module):
    """Calls a function, and ignores its argument."""

    def __init__(self, plain: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.plain = plain  # DDP looks for its buffers
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
        module.require_forward_param_sync = torch.is_grad_enabled()  # as torch sets it where gradients are reduced

    with module.register_forward_hook(again):
        yield


def _same(gradient: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    """Whether nothing was added to a gradient since it had that version."""
    return gradient is before and gradient._version == version


def _refuse_sparse(module: nn.Module) -> None:
    """Refuses sparse gradients that NCCL cannot reduce (ProcessGroupNCCL.cpp, `allreduce_sparse`)."""
    for name, part in module.named_modules():
        if makes_sparse_gradients(part):
            raise ModuleError(
                f"the gradients of {name!r}, a {type(part).__qualname__}, are sparse, and NCCL adds up dense ones only",
                hint="make it with sparse=False, or set device='cpu'",
                param="module",
            )


def _without_buffers(options: DDPOptions) -> dict[str, bool]:
    """Returns the argument that turns off the broadcast of buffers, by its name in this version of torch."""
    if options.forward_sync_buffers:
        return {}
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def _narrow_all_reduce(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in a narrower dtype. torch's own hook for bfloat16 supports NCCL only."""
    wide = bucket.buffer()
    narrow = wide.to(dtype).div_(dist.get_world_size())
    work: Any = dist.all_reduce(narrow, async_op=True)

    def widen(_: Any) -> torch.Tensor:
        return wide.copy_(narrow)

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
    return future
