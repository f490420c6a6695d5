"""Functions for tensors that may be sharded among ranks (torch's `DTensor`)."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from sparktorch.base.quiet import quiet

__all__ = [
    "PIPELINE",
    "TENSOR",
    "divide_gradients",
    "first_copy",
    "gradients_by_copies",
    "local",
    "local_part",
    "mesh_of_training",
    "part_of",
    "sharded_like",
    "step_on_both",
    "unadvised",
    "undivided",
    "unviewed",
    "whole",
]

# Along these dimensions of a mesh, ranks have different parameters, and parts of layers.
PIPELINE, TENSOR = "pipeline", "tensor"
_trainings = itertools.count()


def sharded_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard as a `DTensor` sharded like `parameter`, or as it is if that is not sharded."""
    if not hasattr(parameter, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, shape=parameter.shape, stride=parameter.stride())


class _Unviewed(torch.autograd.Function):
    """Returns the same numbers in the same memory, in a tensor that is no view of another one."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def unviewed(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """A forward hook, with keywords, after which a caller may change the outputs in place.

    Autograd forgets the hooks of a view that is changed in place, FSDP's among them, and refuses to change one that a
    function has made, as those of divided layers. An output in the memory of an input stays a view: a change is one of
    the input, too, whose gradient would be another one.
    """
    if torch.compiler.is_compiling():  # Compiled code has other operators in place of changes.
        return output

    def without_view(tensor: torch.Tensor) -> Any:
        if not (tensor.requires_grad and tensor._is_view()):
            return tensor
        memory = _memory(tensor)
        inputs = [_memory(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return tensor if memory is None or memory in inputs else _Unviewed.apply(tensor)  # type: ignore[no-untyped-call]

    return pytree.tree_map_only(torch.Tensor, without_view, output)


def _memory(tensor: torch.Tensor) -> int | None:
    """Returns the address of a tensor's memory; `None` for tensors without memory of their own, as in `torch.vmap`."""
    is_plain = not hasattr(tensor, "to_local") and tensor.layout == torch.strided
    if not is_plain or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    address: int = tensor.untyped_storage()._cdata
    return address


def divide_gradients(module: nn.Module) -> None:
    """Divides gradients as their parameters are, which torch leaves otherwise.

    Those of a table of which each rank has some rows are whole, and of a norm of which each computes some positions, a
    part of the sum.
    """
    for parameter in module.parameters():
        gradient: Any = parameter.grad
        divided: Any = parameter
        if hasattr(gradient, "to_local") and gradient.placements != divided.placements:
            parameter.grad = gradient.redistribute(divided.device_mesh, divided.placements)


def first_copy(tensor: torch.Tensor) -> bool:
    """Whether this rank is the first of those that have the same shard of a `DTensor`."""
    ranks, sharded = _sharded(tensor)
    coordinates = zip(_plain(ranks), ranks.get_coordinate() or [], strict=True)
    return all(coordinate == 0 for name, coordinate in coordinates if name not in sharded)


def gradients_by_copies(module: nn.Module, ranks: int, plain: int = 1) -> dict[int, list[torch.Tensor]]:
    """Returns this rank's parts of a module's gradients, by how many of all ranks have the same part.

    `plain` is how many have the same plain tensor.
    """
    gradients: dict[int, list[torch.Tensor]] = {}
    for parameter in module.parameters():
        if parameter.grad is None:
            continue
        count = plain
        if hasattr(parameter.grad, "to_local"):
            mesh, sharded = _sharded(parameter.grad)
            count = ranks // math.prod(mesh.size(axis) for axis, name in enumerate(_plain(mesh)) if name in sharded)
        gradients.setdefault(count, []).append(local(parameter.grad))
    return gradients


def mesh_of_training(
    groups: Sequence[dist.ProcessGroup], device: str, ranks: torch.Tensor, names: Sequence[str]
) -> DeviceMesh:
    """Returns a mesh that equals none of an earlier training of this process, in which this may have been another rank.

    torch caches what it does with `DTensor`s by mesh, and would give them an earlier one's groups and offsets. `groups`
    are this rank's along each dimension, and `ranks` all ranks, of a shape with a size for each. The names of the
    mesh's dimensions have a number behind an underscore.
    """
    with suppress(ImportError, AttributeError):  # This is private to torch; without it, the cache stays in memory.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    number = next(_trainings)
    unique = tuple(f"{name}_{number}" for name in names)
    one_or_more = list(groups) if len(groups) > 1 else groups[0]
    return DeviceMesh.from_group(one_or_more, device, mesh=ranks, mesh_dim_names=unique)


def part_of(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Returns some dimensions of a mesh that `mesh_of_training` has made."""
    (number,) = {name.rpartition("_")[2] for name in mesh.mesh_dim_names or ()}
    unique = tuple(f"{name}_{number}" for name in names)
    return mesh[unique if len(unique) > 1 else unique[0]]


def _plain(mesh: DeviceMesh) -> list[str]:
    """Returns the names of a mesh's dimensions without the number of the training."""
    return [name.rpartition("_")[0] for name in mesh.mesh_dim_names or ()]


def undivided(tensor: torch.Tensor, dimension: str) -> bool:
    """Whether all ranks along a dimension of the mesh have the same part of a tensor, as they have of a plain one."""
    return not hasattr(tensor, "to_local") or dimension not in _sharded(tensor)[1]


def _sharded(tensor: torch.Tensor) -> tuple[DeviceMesh, set[str]]:
    """Returns the mesh of all ranks, of which a `DTensor`'s may be a part, and the dimensions that divide the tensor.

    Ranks of other stages of a pipeline do not have it at all.
    """
    divided: Any = tensor
    placements = zip(_plain(divided.device_mesh), divided.placements, strict=True)
    names = {name for name, placement in placements if not placement.is_replicate()}
    root: DeviceMesh = divided.device_mesh._get_root_mesh()
    return root, names | ({PIPELINE} & set(_plain(root)))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor. For a sharded one this is a collective, which every rank must call."""
    complete: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return complete


def step_on_both(optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer step on `DTensor`s and plain tensors together, which are the same in all ranks."""
    from torch.distributed.tensor.experimental import implicit_replication

    step: Any = optimizer.step

    @functools.wraps(step)
    def on_both(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with implicit_replication():
            return step(*args, **kwargs)

    vars(optimizer)["step"] = MethodType(on_both, optimizer)  # Schedulers want a method.


def unadvised() -> AbstractContextManager[None]:
    """Context in which torch does not advise to merge the gathers of a tensor along several dimensions; it cannot."""
    return quiet("torch.distributed.tensor._redistribute", logging.ERROR)


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Returns this rank's shard of a tensor, and its offset along each axis of the whole tensor."""
    part = local(tensor)
    if part is tensor:
        return tensor, [0] * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    divided: Any = tensor
    _, offset = compute_local_shape_and_global_offset(divided.shape, divided.device_mesh, divided.placements)
    return part, list(offset)
