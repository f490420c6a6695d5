"""What the operating system says of a rank's memory."""

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
    """Has `peaks` look from now on, at the host's memory ("cpu") or a device's: Python workers are used again."""
    if is_host(device):
        with suppress(OSError):  # the system may not let it
            Path("/proc/self/clear_refs").write_text("5")
    elif (reset := getattr(module_of(device), "reset_peak_memory_stats", None)) is not None:
        with suppress(RuntimeError):  # nothing was allocated yet
            reset(torch.device(device))


def peaks(device: str) -> dict[str, int]:
    """Returns the most bytes that this process has held: `peak_memory` of the host's, `peak_device_memory` of tensors.

    Where there is no /proc, the former is that since the process began. The latter is there with devices that count.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):  # the one that can be reset
                found["peak_memory"] = int(line.split()[1]) * 1024
    most = None if is_host(device) else getattr(module_of(device), "max_memory_allocated", None)
    if most is not None:
        found["peak_device_memory"] = most(torch.device(device))
    return found


def resident_bytes() -> int:
    """Returns the memory that this process holds, in bytes; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def out_of_memory_kills() -> int:
    """Returns how many processes of this machine the out-of-memory killer has ended since it was started.

    Read from the kernel's `oom_kill` counter, which counts those of memory-limited containers, too; 0
    where the system does not say.
    """
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
