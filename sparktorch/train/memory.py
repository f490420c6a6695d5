"""What the operating system says of a rank's memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["out_of_memory_kills", "resident_bytes"]


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
