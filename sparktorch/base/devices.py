"""A rank's device: all code that differs between CPUs and torch's accelerators.

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
    "seed",
    "select",
    "upload",
    "visible_devices",
    "wait_for",
]


def is_host(device: str | torch.device) -> bool:
    """Whether a device is the CPU."""
    return torch.device(device).type == "cpu"


def module_of(device: str | torch.device) -> Any:
    """Returns torch's module for a device's type, such as `torch.cuda` for "cuda:1"."""
    return torch.get_device_module(device)


def seed(value: int, device: str | torch.device) -> None:
    """Seeds torch's generators of the host and of a device.

    `torch.manual_seed` would also format the stack for each type of accelerator that is not initialised, which takes
    0.3 ms in a rank.
    """
    torch.default_generator.manual_seed(value)
    if not is_host(device):
        module_of(device).manual_seed_all(value)


def accelerator() -> str | None:
    """Returns the type of accelerator that this build of torch is for, whether or not the machine has one.

    It returns `None` for a CPU build, and for Apple's MPS, which has no float64. It does not initialise the driver: the
    process could not be forked afterwards.
    """
    current = torch.accelerator.current_accelerator()
    return None if current is None or current.type == "mps" else current.type


def is_kind(name: str) -> bool:
    """Whether torch knows an accelerator type of this name, even if this build does not support it."""
    try:
        device = torch.device(name)
        return device.index is None and device.type not in ("cpu", "mps") and hasattr(module_of(device), "device_count")
    except RuntimeError:  # It names no device, or one without a module.
        return False


def device_count(kind: str | None = None) -> int:
    """Returns how many devices of a type torch sees, by default of the type `accelerator()`; 0 if there is none."""
    kind = kind or accelerator()
    try:
        return 0 if kind is None else int(module_of(kind).device_count())
    except (RuntimeError, AttributeError):  # torch was built without this type.
        return 0


def visible_devices(kind: str) -> str | None:
    """Returns the value of the environment variable that restricts the visible devices of a type; `None` if not set."""
    # HIP prefers its own variable to CUDA's.
    if kind == "cuda" and torch.version.hip is not None:
        hip_devices = os.environ.get("HIP_VISIBLE_DEVICES")
        return hip_devices if hip_devices is not None else os.environ.get("CUDA_VISIBLE_DEVICES")
    names = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
    return os.environ.get(names[kind]) if kind in names else None


def backend_of(device: str) -> str:
    """Returns the process-group backends for a device: Gloo, and for an accelerator also its backend, such as NCCL.

    With both, the group can also reduce CPU tensors: values that need not wait for the device, and norms of gradients
    that FSDP offloads.
    """
    if is_host(device):
        return "gloo"
    kind = torch.device(device).type
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def select(device: str) -> None:
    """Makes a device this thread's current device; does nothing for the CPU."""
    if not is_host(device):
        module_of(device).set_device(torch.device(device))


def free_bytes(device: str) -> int:
    """Returns an accelerator's free memory in bytes; 0 if torch does not report it."""
    mem_get_info = getattr(module_of(device), "mem_get_info", None)
    return 0 if mem_get_info is None else int(mem_get_info(torch.device(device))[0])


def let_go(device: str) -> None:
    """Frees torch's caches of an accelerator's memory and of pinned host memory."""
    if not is_host(device):
        # Modules and their hooks form reference cycles, which only a collection frees.
        gc.collect()
        module_of(device).empty_cache()
        # The name of the function that frees cached pinned memory depends on the version of torch.
        empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)
        if empty_host_cache is None:
            empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to a device through pinned memory, without making the host wait.

    Kernels of the current stream see the complete copy. A tensor that is on the device already is returned as it is.
    """
    if device.type == "cpu":
        return tensor
    if not tensor.is_cpu:
        return tensor.to(device)
    # An expanded tensor, which has a stride of 0, cannot be pinned.
    dense = tensor.contiguous() if 0 in tensor.stride() else tensor
    return dense.pin_memory().to(device, non_blocking=True)


def jagged(values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns a jagged nested tensor from concatenated elements, without waiting for the device.

    Without the smallest and the largest length, torch would compute them on the device, and wait for it.

    Args:
        values: The elements of all rows.
        offsets: Where each row begins, and the last one ends, int64 of shape `(rows + 1,)` on the device of the values.
        lengths: Number of elements in each row, int64 on the CPU.
    """
    if not len(lengths):
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    shortest = int(lengths.min())
    longest = int(lengths.max())
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=shortest, max_seqlen=longest)


def download(tensors: Mapping[str, torch.Tensor], *, copy: bool = False) -> dict[str, torch.Tensor]:
    """Returns tensors on the CPU, by the same names; the host waits once per device, not once per tensor.

    With `copy`, tensors that are on the CPU already are copied.
    """
    # Copies from a device do not block, so the host waits once for all of them. torch puts them into pinned memory.
    copies = {name: tensor.to("cpu", copy=copy, non_blocking=not tensor.is_cpu) for name, tensor in tensors.items()}
    for device in {tensor.device for tensor in tensors.values()}:
        wait_for(device)
    return copies


def wait_for(device: str | torch.device) -> None:
    """Waits until an accelerator has finished the work in this thread's current stream."""
    if not is_host(device):
        module_of(device).current_stream(torch.device(device)).synchronize()
