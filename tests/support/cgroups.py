"""A limit of memory that processes can be put under."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import until

# Where memory is limited, in the two versions of control groups.
_ROOTS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


@contextmanager
def limited_memory(mebibytes: int) -> Iterator[Path]:
    """Makes a control group, which a process enters by writing its id into `cgroup.procs`; gone after the block."""
    group = _made(mebibytes << 20)
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), seconds=30, what=f"{group} is empty")
        until(lambda: _removed(group), seconds=30, what=f"{group} is removed")


def _made(limit: int) -> Path:
    reasons = []
    for root, name in _ROOTS:
        group = root / f"sparktorch-{secrets.token_hex(8)}"
        try:
            group.mkdir()
        except OSError as error:
            reasons.append(str(error))
            continue
        try:
            with (group / name).open("r+") as file:  # the kernel makes it, or memory is not limited here
                file.write(str(limit))
        except OSError as error:
            reasons.append(str(error))
            group.rmdir()
        else:
            return group
    raise OSError("; ".join(reasons))


def _removed(group: Path) -> bool:
    """Whether the group could be removed; of processes that have just ended, something may still be in it."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()
