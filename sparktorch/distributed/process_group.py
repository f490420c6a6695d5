"""The process group as a context: opened for a fit, and always closed after it."""

from __future__ import annotations

import fcntl
import gc
import inspect
import os
import socket
import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparktorch.base.devices import backend_of, is_host
from sparktorch.base.no_op import no_op
from sparktorch.base.world import World
from sparktorch.errors import ClusterError, RankError, SparkTorchError, causes

__all__ = [
    "KEEPS_ORDER",
    "abandon",
    "attach",
    "clear_frames",
    "collectives_begun",
    "hang_up",
    "is_communication",
    "max_over_ranks",
    "opening",
    "process_group",
    "set_up_error",
    "subgroup",
    "sum_over_ranks",
]

# Whether torch can number the ranks of a group in the order in which they are listed.
KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters

# The number of the request to Linux for an interface's address, from <linux/sockios.h>.
_SIOCGIFADDR = 0x8915

# What to do, by NCCL's error code.
_NCCL_HINTS = {
    "ncclInvalidUsage": "is a GPU in the hands of two ranks? One rank needs one device: start one executor on each "
    "machine, or let the cluster manager isolate devices",
    "ncclInvalidArgument": "is it the same version of torch on all executors?",
    "ncclSystemError": "do the executors reach each other on the interface NCCL_SOCKET_IFNAME, and is there room in "
    "/dev/shm?",
    "ncclUnhandledCudaError": "is there memory left on the GPU, and does its driver suit torch's CUDA?",
    "ncclInternalError": "do the executors reach each other on the interface NCCL_SOCKET_IFNAME?",
}

# This list keeps the last groups of this process alive until the next ones open. Deleting a group joins threads that
# may wait for the GIL. Where this list has the last reference, dropping it releases the GIL meanwhile. Where DDP's
# reducer has the last reference, which a traceback may keep alive, dropping it does not release the GIL.
_last_groups: list[dist.ProcessGroup | None] = []

# Contexts that `attach` has entered: they are left just before the process group closes.
_attached = ExitStack()
# The timeout of the group that `process_group` opened last; its subgroups have the same.
_timeout: timedelta | None = None


@contextmanager
def process_group(
    world: World,
    store: dist.Store,
    *,
    timeout: timedelta,
    lone: bool = False,
    report: Callable[[BaseException], object] = no_op,
) -> Iterator[None]:
    """Context with the default process group open over `store`; a single rank gets no group unless `lone`.

    Reused Python workers keep module state: a group that an earlier job left open is closed first. `timeout` is how
    long a collective may wait. `report` is called with the block's exception before the group is closed: closing may
    block, or raise another exception, while an NCCL collective hangs.
    """
    if world.world_size == 1 and not lone:
        yield
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    global _timeout
    _timeout = timeout
    # A group's keys in the store have its number in this process. A group that could not be opened may have been
    # counted in this process alone: then the ranks would use different keys.
    dist.distributed_c10d._world.group_count = 0
    with opening(world):
        try:
            dist.init_process_group(
                backend_of(world.device),
                store=dist.PrefixStore("group", store),
                rank=world.rank,
                world_size=world.world_size,
                timeout=timeout,
                device_id=None if is_host(world.device) else torch.device(world.device),
            )
        except dist.DistBackendError as error:
            cause = set_up_error(error)
            if cause is None:
                raise
            raise cause from error
    _last_groups[:] = [dist.group.WORLD]
    _calm_gloo()
    try:
        with _attached:
            yield
    except BaseException as error:
        abandon(error, report)
        raise
    if dist.is_initialized():  # A callback may have closed it.
        dist.destroy_process_group()


def abandon(error: BaseException, report: Callable[[BaseException], object]) -> None:
    """Reports an error, and closes the default process group without waiting for its peers."""
    if isinstance(error, Exception):
        with suppress(Exception):  # The store may be gone, too.
            report(error)
    # Groups are aborted first: destroying a group waits for its pending collectives, which wait for peers that may be
    # destroying their groups, too.
    if dist.group.WORLD is not None:
        for group in _groups():
            with suppress(Exception):
                group.abort()
    with suppress(Exception):  # An error on closing would replace the error that is the cause.
        dist.destroy_process_group()


def hang_up(error: BaseException) -> None:
    """Closes the connections of the last groups, which an error has closed, so that peers waiting for this rank end.

    Connections close when nothing refers to their group any more; frames in the error's traceback may refer to it.
    With collectives under way, this waits for the peers.
    """
    clear_frames(error)
    gc.collect()
    _last_groups.clear()


def clear_frames(error: BaseException | None) -> None:
    """Clears the local variables in the tracebacks of an error and its causes, because the error lives on."""
    for cause in causes(error, contexts=True):
        traceback.clear_frames(cause.__traceback__)


def _groups() -> list[Any]:
    """Returns the groups that this package has opened, the default group first; users may have opened others."""
    default = dist.group.WORLD
    opened = dist.distributed_c10d._world.pg_map
    return [default, *(group for group in _last_groups if group is not default and group in opened)]


def set_up_error(error: BaseException) -> ClusterError | None:
    """Returns a user-facing error if NCCL cannot be set up; `None` for other errors, such as a lost peer.

    The message has a code from `ncclResult_t`, as torch spells it in `getNcclErrorDetailStr`
    (torch/csrc/distributed/c10d/NCCLUtils.cpp).
    """
    text = str(error)
    hints = [hint for code, hint in _NCCL_HINTS.items() if code in text]
    if "NCCL" not in text or "ncclRemoteError" in text or not hints:
        return None
    reason = next((line for line in reversed(text.splitlines()) if line.strip()), text)
    return ClusterError(f"NCCL cannot join the ranks: {reason.strip()}", hint=f"{hints[0]}; NCCL_DEBUG=INFO says more")


def is_communication(error: BaseException) -> bool:
    """Returns whether the error or one of its causes is a broken connection, as ranks see when a peer dies."""
    signs = ("Connection reset by peer", "Connection closed by peer", "gloo", "NCCL")
    for cause in causes(error):
        if isinstance(cause, SparkTorchError) and not isinstance(cause, RankError):
            return False  # This error says already what is wrong, such as NCCL that cannot be set up.
        if isinstance(cause, dist.DistError):
            return True
        if isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in signs):
            return True
    return False


def subgroup(world: World, groups: list[list[int]]) -> dist.ProcessGroup:
    """Opens several groups at once, in all ranks; returns the group that this rank is in.

    `groups` has the ranks of each group; every rank is in one group. Without `KEEPS_ORDER`, torch numbers a group's
    ranks in ascending order. Collectives may wait as long as those in the default group.
    """
    (members,) = (ranks for ranks in groups if world.rank in ranks)
    order: Any = {"sort_ranks": False} if KEEPS_ORDER else {}
    with opening(world):
        # NCCL splits the default group, in which every rank takes part once. No rank opens a group that it is not in.
        group: Any = dist.new_group(members, timeout=_timeout, use_local_synchronization=True, **order)
    _calm_gloo()
    _last_groups.append(group)
    return group  # type: ignore[no-any-return]


def collectives_begun() -> int | None:
    """Returns how many collectives this rank has started; `None` without a process group.

    The other ranks wait for the rank that has started the fewest.
    """
    if dist.group.WORLD is None:
        return None
    try:
        # A group of accelerators also has a backend for CPU tensors. A backend that types of devices share counts once.
        backends: dict[int, Any] = {}
        for group in _groups():
            for device_type in group._device_types:
                backend = group._get_backend(device_type)
                backends[id(backend)] = backend
        return sum(int(backend._get_sequence_number_for_group()) for backend in backends.values())
    except RuntimeError:  # The group is being closed.
        return None


def sum_over_ranks(values: torch.Tensor, world: World) -> torch.Tensor:
    """Returns the element-wise sum of `values`, float64 of one shape, over all ranks, on the CPU."""
    return _all_reduce(values, world, dist.ReduceOp.SUM)


def max_over_ranks(values: torch.Tensor, world: World) -> torch.Tensor:
    """Returns the element-wise maximum of `values` over all ranks, on the CPU; see `sum_over_ranks`."""
    return _all_reduce(values, world, dist.ReduceOp.MAX)


def _all_reduce(values: torch.Tensor, world: World, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    reduced = values.to("cpu", copy=True)
    if world.world_size > 1:
        dist.all_reduce(reduced, operation)
    return reduced


def attach(resource: AbstractContextManager[Any]) -> None:
    """Enters a context; it is left just before the process group closes, with the exception of the group's block."""
    _attached.enter_context(resource)


@contextmanager
def opening(world: World) -> Iterator[None]:
    """Context with the environment variables that Gloo and NCCL read on opening a group; the user's values stay.

    Gloo and NCCL use the network interface that has the rank's address, instead of guessing by host name or taking the
    first interface. torch's NCCL watchdog threads do not end the process when a collective or CUDA fails or hangs: they
    would do so before the rank could report it. The monitor on the driver finds stalled ranks. The variables
    and `ErrorHandlingMode` are in torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp.

    Ranks on CPUs record no collectives. torch's flight recorder would keep a few small objects for each of the last
    2000 collectives (torch/csrc/distributed/c10d/FlightRecorder.hpp), such as the names of groups, which are long
    except for the default group's. The objects lie in the host's memory between the blocks that a step frees. So the
    allocator cannot join those blocks for the next step, and a rank of a mesh grows by many times the model. Torch
    reads the variable once in a process.
    """
    name = _interface_of(world.address) if world.address else None
    variables = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    # Users may have set the next two variables under their older names.
    if "NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
        variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if is_host(world.device) and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        variables["TORCH_FR_BUFFER_SIZE"] = "0"
    if name is not None:
        # Without the "=", NCCL would take the name as a prefix.
        variables |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    added = {key: value for key, value in variables.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def _calm_gloo() -> None:
    """Keeps Gloo's event loop from preempting the threads that compute and send.

    The loop spins while another thread holds a connection's lock. If the loop has preempted that very thread, it spins
    for its whole time slice, which is several steps of a small model. Under `SCHED_BATCH` the loop wakes up as fast on
    an idle core, but does not preempt other threads.
    """
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # The thread has ended, or this system has no batch threads.
            if (thread / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def _interface_of(address: str) -> str | None:
    """Returns the name of the network interface that has the IPv4 address, or `None`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # Linux takes, and fills, a `struct ifreq`: the name, of at most 15 bytes, and room for the answer.
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # The interface has no IPv4 address.
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
