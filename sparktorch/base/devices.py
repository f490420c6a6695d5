"""The devices of a rank: what differs between CPUs and the accelerators that torch knows, in one place.

An accelerator is addressed by its type ("cuda", which includes ROCm, "xpu", or that of a plug-in) through
`torch.get_device_module`, whose modules have the same functions for streams, memory and random numbers.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "accelerator",
    "backend_of",
    "device_count",
    "download",
    "free_bytes",
    "is_host",
    "is_kind",
    "jagged",
    "let_go",
    "module_of",
    "select",
    "upload",
    "visible_devices",
    "wait_for",
]


def is_host(device: str | torch.device) -> bool:
    """Whether a device is the CPU."""
    return torch.device(device).type == "cpu"


def module_of(device: str | torch.device) -> Any:
    """Returns torch's module of a device's type: `torch.cuda` of "cuda:1"."""
    return torch.get_device_module(device)


def accelerator() -> str | None:
    """Returns the type of accelerator that this build of torch is for, whether or not the machine has one.

    It does not initialise a driver, after which the process could not be forked. `None` stands for a build without
    one, and for Apple's, whose tensors cannot be float64.
    """
    found = torch.accelerator.current_accelerator()
    return None if found is None or found.type == "mps" else found.type


def is_kind(name: str) -> bool:
    """Whether torch knows a type of accelerator by that name, whether or not it was built for it."""
    try:
        found = torch.device(name)
        return found.index is None and found.type not in ("cpu", "mps") and hasattr(module_of(found), "device_count")
    except RuntimeError:  # no device, or one without a module
        return False


def device_count(kind: str | None = None) -> int:
    """Returns how many devices of a type torch sees, by default of `accelerator`'s; 0 where it has no such type."""
    kind = kind or accelerator()
    try:
        return 0 if kind is None else int(module_of(kind).device_count())
    except (RuntimeError, AttributeError):  # torch was built without it
        return 0


def visible_devices(kind: str) -> str | None:
    """Returns the value of the variable that hides devices of a type from this process, `None` where it is not set."""
    if kind == "cuda" and torch.version.hip is not None:  # HIP reads its own first, and then CUDA's
        own = os.environ.get("HIP_VISIBLE_DEVICES")
        return own if own is not None else os.environ.get("CUDA_VISIBLE_DEVICES")
    names = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
    return os.environ.get(names[kind]) if kind in names else None


def backend_of(device: str) -> str:
    """Returns the backends of a process group for a device: Gloo, and beside it the accelerator's own.

    With both, tensors on the CPU can be reduced in the group, too: the norm of gradients that FSDP keeps there, and
    whatever need not wait for the device.
    """
    if is_host(device):
        return "gloo"
    kind = torch.device(device).type
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def select(device: str) -> None:
    """Makes a device the one that this thread's kernels run on, unless they say otherwise."""
    if not is_host(device):
        module_of(device).set_device(torch.device(device))


def free_bytes(device: str) -> int:
    """Returns how much memory of an accelerator is free, in bytes; 0 where torch cannot say."""
    found = getattr(module_of(device), "mem_get_info", None)
    return 0 if found is None else int(found(torch.device(device))[0])


def let_go(device: str) -> None:
    """Gives the memory that torch keeps of an accelerator back to it, and pinned memory to the host."""
    if not is_host(device):
        gc.collect()  # modules and their hooks refer to each other
        module_of(device).empty_cache()
        _empty_host_cache()


def _empty_host_cache() -> None:
    """Gives pinned memory back, by the name that this version of torch has for it."""
    found = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if found is not None:
        found()


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy on the device, from pinned memory, for which the host does not wait; a tensor there as it is.

    Kernels of the current stream see all of it.
    """
    if device.type == "cpu":
        return tensor
    if not tensor.is_cpu:
        return tensor.to(device)
    dense = tensor.contiguous() if 0 in tensor.stride() else tensor  # an expanded one has no memory of its own to pin
    return dense.pin_memory().to(device, non_blocking=True)


def jagged(values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns a nested tensor that knows its shortest and longest row, for which torch would wait for the device.

    Args:
        values: All elements, of shape `(elements, ...)`.
        offsets: Where each row begins and the last one ends, int64 of shape `(rows + 1,)`, on the same device.
        lengths: Number of elements of each row, int64 of shape `(rows,)`, on the CPU.
    """
    known: dict[str, Any] = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())} if len(lengths) else {}
    return torch.nested.nested_tensor_from_jagged(values, offsets, **known)


def download(tensors: Mapping[str, torch.Tensor], *, copy: bool = False) -> dict[str, torch.Tensor]:
    """Returns tensors on the CPU, by the same names; the host waits once for those of a device, and not for each.

    Args:
        tensors: By name.
        copy: Whether to copy those that are on the CPU already, too.
    """
    # torch pins the memory that it copies to without waiting.
    found = {name: tensor.to("cpu", copy=copy, non_blocking=not tensor.is_cpu) for name, tensor in tensors.items()}
    for device in {tensor.device for tensor in tensors.values()}:
        wait_for(device)
    return found


def wait_for(device: str | torch.device) -> None:
    """Waits until an accelerator has done what this thread's current stream was given."""
    if not is_host(device):
        module_of(device).current_stream(torch.device(device)).synchronize()
