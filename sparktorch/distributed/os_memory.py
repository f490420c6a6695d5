"""A rank's memory use, as reported by the operating system and by torch."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from sparktorch.base.devices import is_host, module_of

__all__ = ["forget_peaks", "out_of_memory_kills", "peaks", "resident_bytes"]


def forget_peaks(device: str) -> None:
    """Resets the peak memory of the host ("cpu") or of a device: reused Python workers keep it from earlier tasks."""
    if is_host(device):
        with suppress(OSError):  # the system may forbid it
            Path("/proc/self/clear_refs").write_text("5")
    elif (reset := getattr(module_of(device), "reset_peak_memory_stats", None)) is not None:
        with suppress(RuntimeError):  # nothing was allocated yet
            reset(torch.device(device))


def peaks(device: str) -> dict[str, int]:
    """Returns this process's peak memory in bytes: `peak_memory` on the host, `peak_device_memory` of device tensors.

    Without /proc, `peak_memory` is the peak since the process started. `peak_device_memory` is missing for the CPU, and
    for devices whose peak torch does not record.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):  # unlike `ru_maxrss`, it can be reset
                found["peak_memory"] = int(line.split()[1]) * 1024
    most = None if is_host(device) else getattr(module_of(device), "max_memory_allocated", None)
    if most is not None:
        found["peak_device_memory"] = most(torch.device(device))
    return found


def resident_bytes() -> int:
    """Returns this process's resident memory in bytes; 0 if the system does not report it."""
    with suppress(OSError, ValueError, IndexError):
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
