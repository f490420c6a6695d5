"""A process's memory: how much it takes and may take, and how the C library gives freed memory back."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparktorch.base.devices import is_host, module_of

__all__ = [
    "available_bytes",
    "forget_peaks",
    "given_back",
    "out_of_memory_kills",
    "peaks",
    "resident_bytes",
    "trim",
]

# These are the numbers of two parameters of glibc's mallopt.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
# glibc itself raises the threshold of mmap up to this size, and the threshold of trim up to twice this size.
_LARGEST = 32 << 20

_NO_LIMIT = 1 << 60  # Version 1 of control groups writes "no limit" as a number beyond this one.
_UNREADABLE = (OSError, ValueError, IndexError)  # Files that are missing, or in another format, raise these errors.


class _GroupFiles(NamedTuple):
    """The files of a version of control groups.

    Attributes:
        root: The folder of all groups.
        limits: The files in a group's folder that hold its limits.
        use: The file in a group's folder that holds its use of memory.
        cache: The name in the group's `memory.stat` for the part of its use that is the kernel's cache of files.
    """

    root: str
    limits: tuple[str, ...]
    use: str
    cache: str


# The keys are what /proc/self/cgroup calls a group: nothing in version 2, and in version 1 what it controls.
_GROUPS = {
    "": _GroupFiles("/sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "memory": _GroupFiles(
        "/sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
    ),
}


def trim() -> None:
    """Gives freed memory back to the system, as far as the C library can."""
    call = _function("malloc_trim")
    if call is not None:
        call(0)


def available_bytes() -> float:
    """Returns how many bytes this process may still take, as far as the system tells; infinite if it does not.

    It is the least of:

    - what the machine has available;
    - what is left of the limits of the control groups that the process is in, such as that of a Kubernetes container;
    - what is left of the limit of its address space (`spark.executor.pyspark.memory`).

    It is 0 in a YARN container without a control group's limit: YARN counts the use of memory, and tells no process how
    much it may take.
    """
    bytes_left = [math.inf]
    left_in_groups = [math.inf]
    with suppress(*_UNREADABLE):
        bytes_left.append(1024 * _number_after(Path("/proc/meminfo"), "MemAvailable:"))
    with suppress(*_UNREADABLE):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            left_in_groups += _left_in_groups(path, controllers)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with suppress(*_UNREADABLE):
            bytes_left.append(limit - 1024 * _number_after(Path("/proc/self/status"), "VmSize:"))
    if "CONTAINER_ID" in os.environ and min(left_in_groups) == math.inf:
        return 0
    return max(0, min(bytes_left + left_in_groups))


def _left_in_groups(path: str, controllers: str) -> list[float]:
    """Returns how many bytes a control group, and each group that it is in, has left; none if it controls no memory."""
    key = "memory" if "memory" in controllers.split(",") else controllers
    if key not in _GROUPS:
        return []
    files = _GROUPS[key]
    root = Path(files.root)
    # The group's folder does not exist if the container sees its own group as the root, which is among the parents.
    group = root / path.lstrip("/")
    folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return [_left_in_group(folder, files) for folder in folders]


def _left_in_group(folder: Path, files: _GroupFiles) -> float:
    """Returns how many bytes a control group has left; infinite if it has no limit."""
    limit = math.inf
    for name in files.limits:
        with suppress(*_UNREADABLE):  # "max" is no number, and no limit.
            limit = min(limit, int((folder / name).read_text()))
    if limit >= _NO_LIMIT:
        return math.inf
    with suppress(*_UNREADABLE):
        # The kernel gives up its cache of files before the group is full.
        return limit - int((folder / files.use).read_text()) + _number_after(folder / "memory.stat", files.cache)
    return limit


def _number_after(path: Path, name: str) -> int:
    """Returns the number after a name at the start of a line in a file; 0 if no line begins with the name."""
    for line in path.read_text(errors="replace").splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    return 0


def forget_peaks(device: str) -> None:
    """Resets the peak memory of the host ("cpu") or of a device: a reused Python worker has it from earlier tasks."""
    if is_host(device):
        with suppress(OSError):  # The system may forbid it.
            Path("/proc/self/clear_refs").write_text("5")
        return
    reset = getattr(module_of(device), "reset_peak_memory_stats", None)
    if reset is not None:
        with suppress(RuntimeError):  # Nothing was allocated yet.
            reset(torch.device(device))


def peaks(device: str) -> dict[str, int]:
    """Returns this process's peak memory in bytes: `peak_memory` on the host, `peak_device_memory` for device tensors.

    Without /proc, `peak_memory` is the peak since the process started. `peak_device_memory` is missing for the CPU, and
    for devices whose peak torch does not record.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    sizes = {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):  # Unlike `ru_maxrss`, this peak can be reset.
                sizes["peak_memory"] = int(line.split()[1]) * 1024
    max_allocated = None if is_host(device) else getattr(module_of(device), "max_memory_allocated", None)
    if max_allocated is not None:
        sizes["peak_device_memory"] = max_allocated(torch.device(device))
    return sizes


def resident_bytes() -> int:
    """Returns this process's resident memory in bytes; 0 if the system does not report it."""
    with suppress(*_UNREADABLE):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def out_of_memory_kills() -> int:
    """Returns how many processes the out-of-memory killer has killed on this machine since boot.

    Reads the kernel's `oom_kill` counter, which includes kills in memory-limited containers. Returns 0 if the system
    does not report it.
    """
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


@contextmanager
def given_back(least: int) -> Iterator[None]:
    """Context in which blocks of at least `least` bytes are given back to the system as soon as they are freed.

    Otherwise, glibc keeps blocks of up to 32 MiB for later use, and often cannot use them: torch asks for aligned
    memory, which a freed block of the same size does not hold. So ranks that gather parameters, and free them again,
    would grow by several times the model. The price is that mapping each block anew may double the time of a step.
    """
    call = _function("mallopt")
    if call is not None and least < _LARGEST:
        call(_TRIM_THRESHOLD, 2 * _LARGEST)
        call(_MMAP_THRESHOLD, least)
    try:
        yield
    finally:
        if call is not None and least < _LARGEST:
            call(_MMAP_THRESHOLD, _LARGEST)


def _function(name: str) -> Callable[..., Any] | None:
    """Returns a function of the C library; `None` if it has no such function, because it is not glibc."""
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), name, None)
    return function
