"""Data parallel: every rank holds the whole model, and gradients are all-reduced during backward.

Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training
(https://arxiv.org/abs/2006.15704). Under ZeRO stage 1, every rank keeps the optimizer state for its share of the
parameters only: Rajbhandari et al. 2020 (https://arxiv.org/abs/1910.02054), section 5.1.
"""

# No `from __future__ import annotations`: torch inspects the annotations of communication hooks.
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparktorch.base.config import at_least, one_of
from sparktorch.base.devices import backend_of, is_host
from sparktorch.errors import ConfigError, ConflictError, ModuleError
from sparktorch.train.recipe.recipe import Recipe, makes_sparse_gradients
from sparktorch.train.strategies.base import GradientSync, Job, Kind, OwnState, Start, Strategy, check_optimizer_class
from sparktorch.train.strategies.ddp_gradients import DDPGradients, call_instead, parameters_with_sparse_gradients

__all__ = ["DDP", "KIND", "ZERO1", "DDPOptions"]

_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")  # PowerSGD has these by the index of a bucket.
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class DDPOptions:
    """Options of `ddp` and `zero1`; see `torch.nn.parallel.DistributedDataParallel`.

    Attributes:
        bucket_cap_mb: Size of gradient buckets in MB; 0 sends each gradient by itself. `None` is torch's default: 25,
            and 1 for the first bucket, so that sending starts early in backward. Not for "powerSGD" on CPUs, where one
            has all.
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
        at_least("strategyParams.powersgd_start_step", self.powersgd_start_step, 2)  # This is torch's own bound.
        if self.comm_hook is not None:
            one_of("strategyParams.comm_hook", self.comm_hook, ("fp16", "bf16", "powerSGD"))


class DDP(Strategy[DDPOptions]):
    """`DistributedDataParallel`; a single rank uses the module unwrapped.

    A parameter that this rank's rows do not use in a step adds zeros to the gradient of the others. One that no rank
    uses gets no gradient, so that no optimizer changes it. Ranks can tell which those are only if DDP searches for them
    in every step (`find_unused_parameters`), which takes a tenth of a small step or more. So they search where the dry
    run has found such a parameter, or once a step has.
    """

    def prepare(self, module: nn.Module, start: Start) -> nn.Module:
        """Wraps the module, and broadcasts rank 0's initial parameters and buffers."""
        if "nccl" in backend_of(self._world.device) and not self._alone:
            _refuse_sparse(module)
        tensors = [*module.parameters(), *module.buffers()]
        if any(tensor.device != self._device for tensor in tensors):  # A module without values cannot be moved.
            module.to(self._device)
        if self._alone:
            return module
        options, index = self._options, self._device.index
        wrapped = DistributedDataParallel(
            module,
            device_ids=None if index is None else [index],
            bucket_cap_mb=self._bucket_cap(module),
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            **_without_buffers(options),  # type: ignore[arg-type]
            find_unused_parameters=self._searches(module),
        )
        if options.comm_hook == "powerSGD":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

            state = powersgd.PowerSGDState(
                None,
                matrix_approximation_rank=options.powersgd_rank,
                start_powerSGD_iter=options.powersgd_start_step,
            )
            wrapped.register_comm_hook(state, powersgd.powerSGD_hook)
            sizes = f"{self._world.world_size}.{options.powersgd_rank}.{options.bucket_cap_mb}"
            self.own_state = _Compression(state, sizes, self._device)
        elif options.comm_hook is not None:
            wrapped.register_comm_hook(_DTYPES[options.comm_hook], _narrow_all_reduce)
        return wrapped

    def gradients(self, module: nn.Module) -> GradientSync:
        """Returns what lets DDP reduce gradients."""
        if not isinstance(module, DistributedDataParallel):
            return super().gradients(module)
        return DDPGradients(
            module,
            self._world.world_size,
            searches=self._searches(module),
            static_graph=self._options.static_graph,
            in_users_loop=self._in_users_loop,
        )

    def _searches(self, module: nn.Module) -> bool:
        """Whether DDP searches for parameters that a step does not use; few rows look up a table."""
        asked = self._options.find_unused_parameters
        return (self._config.unused_parameters if asked is None else asked) or bool(
            parameters_with_sparse_gradients(module)
        )

    def _bucket_cap(self, module: nn.Module) -> float | None:
        """Returns the size of buckets in MB."""
        options = self._options
        if _in_one_bucket(options, self._world.device):
            return 1 + sum(parameter.nbytes for parameter in module.parameters()) / (1 << 20)
        # Versions of torch before 2.13 refuse 0; no gradient fits beside another in one byte.
        return 1 / (1 << 20) if options.bucket_cap_mb == 0 else options.bucket_cap_mb

    def within_forward(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        """Calls the function in place of the module's forward pass, so that DDP prepares to reduce its gradients."""
        return call_instead(module, function) if isinstance(module, DistributedDataParallel) else function()

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """Context in which every rank has rank 0's buffers; running statistics are each rank's own otherwise."""
        with super().evaluating(module.module if isinstance(module, DistributedDataParallel) else module) as plain:
            yield plain


class Zero1(DDP):
    """`ZeroRedundancyOptimizer` over `DistributedDataParallel`: each rank updates its share and broadcasts it."""

    def optimizer(self, recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer of this rank's share of the trainable parameters; a single rank's has all of them."""
        if self._alone:
            return recipe.build_optimizer(module)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # This is slow to import.

        factory, parameters, options = recipe.optimizer_call(module)
        # A bucket per rank saves an accelerator one message per parameter. It needs a single dtype, and weights in the
        # contiguous memory format.
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
        bucket = not is_host(self._device) and len(dtypes) == 1 and not self._config.channels_last
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            parameters,
            optimizer_class=factory,
            parameters_as_bucket_view=bucket,
            **options,
        )
        return optimizer

    def saves(self, name: str) -> bool:
        """Every rank saves the state of its own share."""
        return super().saves(name) or name.startswith("optimizer.")


class _Compression(OwnState):
    """PowerSGD's step count and generator, and each bucket's error feedback and low-rank matrices."""

    def __init__(self, state: Any, sizes: str, device: torch.device) -> None:
        """Takes PowerSGD's state, and all settings that the shapes of its tensors depend on."""
        self._state, self._sizes, self._device = state, sizes, device

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns it, as tensors by name."""
        _, keys, position, *_ = self._state.rng.get_state()
        tensors = {
            "steps": torch.tensor([self._state.iter]),
            "generator": torch.tensor([*keys.tolist(), position]),
        }
        for name in _MEMORIES:
            for bucket, value in getattr(self._state, name).items():
                tensors[f"{name}.{self._sizes}.{bucket}"] = value
        return tensors

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores it, without the buckets' tensors if the number of ranks or the options differ."""
        if "steps" not in state:
            return
        self._state.iter = int(state["steps"])
        *keys, position = state["generator"].tolist()
        self._state.rng.set_state(("MT19937", keys, position))
        for name in _MEMORIES:
            prefix = f"{name}.{self._sizes}."
            values = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            setattr(self._state, name, {int(key): value.to(self._device) for key, value in values.items()})


def _refuse_sparse(module: nn.Module) -> None:
    """Refuses sparse gradients that NCCL cannot reduce (ProcessGroupNCCL.cpp, `allreduce_sparse`)."""
    for name, part in module.named_modules():
        if makes_sparse_gradients(part):
            raise ModuleError(
                f"the gradients of {name!r}, a {type(part).__qualname__}, are sparse, and NCCL adds up dense ones only",
                hint="make it with sparse=False, or set device='cpu'",
                param="module",
            )


def _in_one_bucket(options: DDPOptions, device: str) -> bool:
    """Whether one bucket has all gradients: with PowerSGD over Gloo.

    PowerSGD's hook makes three all-reduces for a bucket, the later ones from Gloo's threads when the earlier ones are
    done. With several buckets, their order would differ between ranks, which is a deadlock.
    """
    return options.comm_hook == "powerSGD" and backend_of(device).endswith("gloo")


def _check_dtypes(job: Job) -> None:
    """Refuses trained parameters of several dtypes, of which torch's `ZeroRedundancyOptimizer` takes one."""
    if job.module is None or (job.workers or 1) == 1:
        return
    names = {p.dtype: name for name, p in reversed(list(job.module.named_parameters())) if p.requires_grad}
    if len(names) > 1:
        (other, second), (one, first), *_ = names.items()
        raise ModuleError(
            f"{first!r} is of {one} and {second!r} of {other}, and strategy 'zero1' divides the state of parameters of "
            "one dtype",
            hint="make them of one dtype, or use strategy='ddp'",
            param="module",
            code="ST-STRATEGY",
        )


def _without_buffers(options: DDPOptions) -> dict[str, bool]:
    """Returns the argument that turns off the broadcast of buffers, by its name in this version of torch."""
    if options.forward_sync_buffers:
        return {}
    arguments = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers": False}


def _narrow_all_reduce(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in a narrower dtype. torch's own hook for bfloat16 supports NCCL only."""
    wide = bucket.buffer()
    narrow = wide.to(dtype).div_(dist.get_world_size())
    work: Any = dist.all_reduce(narrow, async_op=True)

    def widen(_: Any) -> torch.Tensor:
        return wide.copy_(narrow)

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
    return future


def _check_settings(job: Job) -> None:
    # Torch records the graph in the first backward pass, which must reduce gradients.
    if job.options.static_graph and job.in_micro_batches:
        raise ConfigError(
            "strategyParams.static_graph does not go together with micro-batches",
            hint="leave out static_graph, or accumulationSteps and microBatchSize",
            param="strategyParams",
            code="ST-STRATEGY",
        )


def _check_zero1_settings(job: Job) -> None:
    check_optimizer_class(job, "worker's share")
    _check_settings(job)


def _check_device(job: Job) -> None:
    if job.options.bucket_cap_mb is not None and _in_one_bucket(job.options, job.device):
        raise ConflictError(
            "strategyParams.bucket_cap_mb has no effect: on CPUs, 'powerSGD' sends all gradients in one bucket",
            hint="leave it out, or compress by 'fp16' or 'bf16'",
            param="strategyParams",
        )


KIND = Kind(options=DDPOptions, rank=DDP, same_weights=True, check_settings=_check_settings, check_device=_check_device)
ZERO1 = replace(KIND, rank=Zero1, check=_check_dtypes, check_settings=_check_zero1_settings)
