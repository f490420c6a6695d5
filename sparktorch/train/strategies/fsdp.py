"""ZeRO stages 2 and 3: gradients, optimizer state and parameters are sharded among the ranks.

Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
(https://arxiv.org/abs/1910.02054), sections 5.2 and 5.3; Zhao et al. 2023, PyTorch FSDP
(https://arxiv.org/abs/2304.11277). Both stages use torch's `fully_shard` (FSDP2), which shards each
parameter along its first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparktorch.base.devices import download, is_host
from sparktorch.base.host_memory import available_bytes, given_back
from sparktorch.base.no_op import no_op
from sparktorch.distributed.process_group import attach
from sparktorch.errors import ConfigError, ConflictError
from sparktorch.train.recipe.adapter import without_caches
from sparktorch.train.sharding.dtensor import gradients_by_copies, mesh_of_training, unadvised, unviewed, whole
from sparktorch.train.sharding.same_units import SameCalls, SameParameters
from sparktorch.train.sharding.units import (
    DTYPES,
    ShardingOptions,
    check_checkpointing,
    check_optimizer,
    check_parameters,
    recomputed,
    units,
)
from sparktorch.train.strategies.base import GradientSync, Job, Kind, Start, Strategy, broadcast

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

__all__ = [
    "ZERO2",
    "ZERO3",
    "ShardedGradients",
    "ShardingOptions",
    "Zero3",
    "check_sharded_settings",
    "check_sharding",
    "needs_group",
]

S = TypeVar("S", bound="ShardingOptions")

_LEAST_BYTES = 1 << 20  # Smaller blocks of host memory are not worth giving back.
# Without activations, a rank that keeps freed blocks grows by less than so many times the model.
_GROWTH = 16


class Zero3(Strategy[S]):
    """Parameters are gathered unit by unit for forward and backward, and freed after each.

    Those of no unit but the whole module are kept from forward to backward.
    """

    _reshard_after_forward = True
    _compares_calls = True  # Ranks compare which units they call, unless the loop is a user's.
    _calls: SameCalls | None = None
    _bytes = 0  # Parameters that have been wrapped have so many, as wide as they are gathered or reduced.

    @classmethod
    def shards(cls, options: S, workers: int) -> bool:
        """Whether parameters are wrapped for sharding."""
        return workers > 1 or needs_group(options)

    @property
    def _wraps(self) -> bool:
        """Whether this rank's parameters are wrapped for sharding."""
        return self.shards(self._options, self._world.world_size)

    @property
    def _alone(self) -> bool:
        """Whether this is the only rank, and the module is not wrapped."""
        return super()._alone and not needs_group(self._options)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks that hold different samples; here in one dimension, named `data`."""
        # Uses the open group: for CPU ranks on hosts with a GPU, init_device_mesh would open another one.
        group = dist.group.WORLD
        assert group is not None
        return mesh_of_training([group], self._device.type, torch.arange(self._world.world_size), ["data"])

    def prepare(self, module: nn.Module, start: Start) -> nn.Module:
        """Shards the module's parameters in place, unit by unit as they are moved to the device."""
        return self._divided(module, self._options, start, module)

    def _divided(self, module: nn.Module, options: ShardingOptions, start: Start, whole: nn.Module) -> nn.Module:
        """Shards the parameters of a module or of a part of `whole`; see `prepare`."""
        parts = units(module, options, whole)
        again = recomputed(parts, options, whole)
        if again:
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

            # A cache that is there in the first pass would be added to in the second.
            apply_activation_checkpointing(without_caches(module), check_fn=again.__contains__)
        if not self._wraps:
            for part in [*parts, module]:
                start.materialise(part)
                part.to(self._device)
            return module
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES.get(options.param_dtype or ""), reduce_dtype=DTYPES.get(options.reduce_dtype or "")
        )
        # Losses of what the module returns are summed, for which half precision has too few digits.
        outermost = replace(policy, output_dtype=torch.float32) if policy.param_dtype else policy
        if is_host(self._device):
            self._spare_memory(module, parts, policy)
        names = {part: name for name, part in module.named_modules()}
        groups = [self.mesh.get_group(axis) for axis in range(self.mesh.ndim) if self.mesh.size(axis) > 1]
        if groups and self._compares_calls and not (self._in_users_loop or self._config.compile):
            self._calls = SameCalls(groups if is_host(self._device) else [])  # No step waits for an accelerator.
        for part in [*parts, module]:
            start.materialise(part)
            # FSDP's hook, which gathers in backward, comes after this one.
            part.register_forward_hook(unviewed, with_kwargs=True)
            alike: Any = SameParameters(names[part], part)
            sharded = fully_shard(
                part,
                mesh=self.mesh,
                # Backward begins with the module's own parameters, as torch has it with `None`.
                reshard_after_forward=self._reshard_after_forward and part is not module,
                mp_policy=outermost if part is module else policy,
                offload_policy=CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
            )
            if self._calls is not None:
                self._calls.add(names[part], part, root=part is module)
            if not self._in_users_loop:  # A user's loop may train two networks in turn.
                sharded.set_custom_reduce_scatter(alike)
        return module

    def _spare_memory(self, module: nn.Module, parts: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> None:
        """Has blocks of the size of gathered parameters given back to the host once they are freed, if it may be short.

        Half of what is available is left for what is not counted: rows, activations, and what others take later.
        """
        widths = [dtype.itemsize for dtype in (policy.param_dtype, policy.reduce_dtype) if dtype is not None]
        self._bytes += sum(p.numel() * max([p.element_size(), *widths]) for p in module.parameters())
        largest = [max(p.nbytes for p in part.parameters()) for part in parts]
        needed = 2 * _GROWTH * self._world.local_size * self._bytes
        if max(largest, default=0) >= _LEAST_BYTES and needed > available_bytes():
            attach(given_back(max(_LEAST_BYTES, min(largest) // (2 * self.mesh.size(-1)))))

    def within_forward(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        """Calls the function in place of the module's forward pass, between the hooks that gather its parameters."""
        if self._alone:
            return function()

        def instead(_: torch.Tensor) -> Any:
            del vars(module)["forward"]  # The function may call the module.
            return function()

        vars(module)["forward"] = instead
        try:
            return module(torch.zeros((), device=self._device))
        finally:
            vars(module).pop("forward", None)

    def gradients(self, module: nn.Module) -> GradientSync:
        """Returns what reduces the gradients of all ranks with other rows."""
        return ShardedGradients(module if self._wraps else None, self._world.world_size, self._calls)

    def gradient_norm(self, module: nn.Module) -> torch.Tensor:
        """Returns the norm of the whole model's gradients, of which some ranks may have copies; on the device."""
        if self._alone:
            return super().gradient_norm(module)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for count, gradients in self._gradients(module).items():
            total += nn.utils.get_total_norm(gradients).to(self._device, torch.float64).square() / count
        dist.all_reduce(total)
        return total.sqrt()

    def _gradients(self, module: nn.Module) -> dict[int, list[torch.Tensor]]:
        """Returns this rank's parts of the gradients, by how many of all ranks have the same."""
        return gradients_by_copies(module, self._world.world_size)

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """Context for forward passes, which gather parameters and are therefore collectives."""
        broadcast(self._common_buffers(module), self._world)
        try:
            yield module
        finally:
            self._let_go(module)

    def _common_buffers(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Returns the buffers of which rank 0's are those of the model."""
        return module.buffers()

    def state_dict(
        self, module: nn.Module, *, copy: bool = False, leave_out: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Gathers the whole model's state dict in rank 0; returns an empty dict in other ranks."""
        if self._alone:
            return super().state_dict(module, copy=copy, leave_out=leave_out)
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        gathered: dict[str, torch.Tensor] = {}
        with unadvised(), self.evaluating(module):
            self._let_go(module)
            for name, value in cast(dict[str, torch.Tensor], get_model_state_dict(module)).items():
                # This is a collective. A device may hold no more than one whole tensor at a time.
                tensor = whole(value.detach().to(self._device) if hasattr(value, "to_local") else value)
                if self._world.is_main and name not in leave_out:
                    gathered[name] = tensor.cpu()
        return download(gathered, copy=copy)

    def shares(self, module: nn.Module, *, copy: bool = False) -> dict[str, torch.Tensor]:
        """Returns this rank's shards by name, and its buffers, which are rank 0's."""
        with self.evaluating(module):
            self._let_go(module)
            named = self._tensors(module)
            first_name = {id(tensor): name for name, tensor in reversed(named.items())}
            shares = {name: tensor.detach() for name, tensor in named.items() if first_name[id(tensor)] == name}
            return {name: tensor.cpu().clone() for name, tensor in shares.items()} if copy else shares

    def _tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the tensors that this rank has a share of, by name."""
        return module.state_dict(keep_vars=True)

    def _let_go(self, module: nn.Module) -> None:
        """Frees gathered parameters, which stay after a forward pass without a backward."""
        if self._alone:
            return
        from torch.distributed.fsdp import FSDPModule

        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


class Zero2(Zero3[ShardingOptions]):
    """Parameters are gathered once per step, and kept from forward to backward."""

    _reshard_after_forward = False


class ShardedGradients(GradientSync):
    """Gradients that `fully_shard` reduces in backward."""

    def __init__(
        self,
        module: nn.Module | None,
        divisor: int,
        calls: SameCalls | None = None,
        complete: Callable[[], None] = no_op,
    ) -> None:
        """Takes the module; `None` if gradients are not sharded, or a schedule reduces them."""
        super().__init__(divisor)
        self._root, self._calls, self._complete = cast("FSDPModule | None", module), calls, complete

    def complete(self) -> None:
        """Completes gradients of which ranks have computed parts."""
        self._complete()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which every rank accumulates unsharded gradients without reducing them."""
        if self._root is None:
            yield
            return
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    @contextmanager
    def reducing(self, *, rows: bool, warm_up: bool = False) -> Iterator[None]:
        """Context of the last pass, at whose end the step ends for what compares calls."""
        yield
        if self._calls is not None:
            self._calls.end_step()


def needs_group(options: ShardingOptions) -> bool:
    """Returns whether an option has an effect for a single rank, too: dtypes and offloading."""
    return options.cpu_offload or options.param_dtype is not None or options.reduce_dtype is not None


def check_sharding(job: Job) -> None:
    """Refuses names in `wrap_classes` that the module lacks, scalars, and optimizers that need whole parameters."""
    if job.module is None:
        return
    parts = units(job.module, job.options)
    check_checkpointing(job.options, type(job.module).__name__, parts)
    if cast("type[Zero3[Any]]", job.kind.rank).shards(job.options, job.workers or 1):
        check_parameters(job.module, parts)
        check_optimizer(job.recipe, job.module)


def check_sharded_settings(job: Job) -> None:
    """Refuses settings that do not go together with gradients and parameters of which a rank has parts."""
    config, strategy = job.config, job.config.strategy
    if config.channels_last:
        raise ConfigError(
            f"channelsLast lays out weights in a way that strategy {strategy!r} cannot divide",
            hint="leave it out, or use strategy='zero1'",
            param="channelsLast",
            code="ST-STRATEGY",
        )
    if config.micro_batch_size == "auto":
        raise ConfigError(
            f"microBatchSize is 'auto', and under strategy {strategy!r} workers wait within a step for one that has no "
            "memory for it",
            hint="set microBatchSize to a number, or use strategy='zero1' or 'ddp'",
            param="microBatchSize",
            code="ST-STRATEGY",
        )
    if config.precision == "fp16":  # Its scaler would see this rank's shards only.
        raise ConfigError(
            f"precision 'fp16' scales the loss, and strategy {strategy!r} divides the gradients",
            hint="set precision='bf16', or strategyParams={'param_dtype': 'bf16', 'reduce_dtype': 'fp32'}",
            param="precision",
            code="ST-STRATEGY",
        )


def _check_device(job: Job) -> None:
    if job.options.cpu_offload and is_host(job.device):
        raise ConflictError(
            "strategyParams.cpu_offload is set, and not every worker has a GPU to offload",
            hint="leave it out, or start as many workers as there are GPUs",
            param="strategyParams",
        )


ZERO3 = Kind(
    options=ShardingOptions,
    rank=Zero3,
    check_settings=check_sharded_settings,
    check_device=_check_device,
    check=check_sharding,
    needs_group=needs_group,
    divides_parameters=True,
)
ZERO2 = replace(ZERO3, rank=Zero2)
