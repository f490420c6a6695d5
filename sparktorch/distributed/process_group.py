"""The process group as a context: opened for a fit, closed after it, whatever happened inside."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparktorch.base.devices import backend_of, is_host
from sparktorch.base.world import World
from sparktorch.errors import ClusterError

__all__ = [
    "attach",
    "collectives_begun",
    "max_over_ranks",
    "opening",
    "process_group",
    "set_up_error",
    "sum_over_ranks",
]

_SIOCGIFADDR = 0x8915

_NCCL_HINTS = {
    "ncclInvalidUsage": "is a GPU in the hands of two ranks? One rank needs one device: start one executor on each "
    "machine, or let the cluster manager isolate devices",
    "ncclInvalidArgument": "is it the same version of torch on all executors?",
    "ncclSystemError": "do the executors reach each other on the interface NCCL_SOCKET_IFNAME, and is there room in "
    "/dev/shm?",
    "ncclUnhandledCudaError": "is there memory left on the GPU, and does its driver suit torch's CUDA?",
    "ncclInternalError": "do the executors reach each other on the interface NCCL_SOCKET_IFNAME?",
}

# The last group of this process, kept until the next one. Ending a group joins threads that may be
# waiting for the GIL: this reference lets go of it meanwhile, the one in DDP's reducer, which a
# traceback keeps alive, does not.
_kept: list[dist.ProcessGroup | None] = []

_attached = ExitStack()


@contextmanager
def process_group(
    world: World,
    store: dist.Store,
    *,
    timeout: timedelta,
    lone: bool = False,
    report: Callable[[BaseException], object] = lambda _: None,
) -> Iterator[None]:
    """Opens the default process group over `store` and closes it on the way out; alone, mostly does nothing.

    Reused Python workers keep module state: a group that an earlier job left open is closed first.

    Args:
        world: This rank's place.
        store: The store the ranks meet at.
        timeout: How long a collective may wait for the other ranks.
        lone: Open one for a rank that is alone, too.
        report: Gets what the block raises, before the group is closed: that may block, or raise something else, where
            a collective of NCCL's will not end.

    Raises:
        ClusterError: NCCL cannot be set up between the ranks.
    """
    if world.world_size == 1 and not lone:
        yield
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    with opening(world.address):
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
    _kept[:] = [dist.group.WORLD]
    _calm_gloo()
    try:
        with _attached:
            yield
    except BaseException as error:
        if isinstance(error, Exception):
            with suppress(Exception):  # the store may be gone, too
                report(error)
        # Destroying waits for what is in flight, and that for peers which may do the same.
        world_group = dist.group.WORLD
        if world_group is not None:
            with suppress(Exception):
                world_group.abort()
        with suppress(Exception):  # which would take the place of what the block has raised
            dist.destroy_process_group()
        raise
    if dist.is_initialized():  # a callback may have closed it
        dist.destroy_process_group()


def set_up_error(error: BaseException) -> ClusterError | None:
    """Returns why NCCL cannot be set up, in the user's terms; `None` for what a lost rank does to the others.

    The codes are those of `ncclResult_t` as torch spells them in `getNcclErrorDetailStr`
    (torch/csrc/distributed/c10d/NCCLUtils.cpp).
    """
    text = str(error)
    found = [hint for code, hint in _NCCL_HINTS.items() if code in text]
    if "NCCL" not in text or "ncclRemoteError" in text or not found:
        return None
    reason = next((line for line in reversed(text.splitlines()) if line.strip()), text)
    return ClusterError(f"NCCL cannot join the ranks: {reason.strip()}", hint=f"{found[0]}; NCCL_DEBUG=INFO says more")


def collectives_begun() -> int | None:
    """Returns how many collectives this rank has begun, `None` without a process group.

    A rank that has begun fewer than the others is the one that they wait for.
    """
    group: Any = dist.group.WORLD
    if group is None:
        return None
    try:  # an accelerator's group has a backend for tensors on the CPU besides
        backends = {id(found): found for found in (group._get_backend(kind) for kind in group._device_types)}
        return sum(int(backend._get_sequence_number_for_group()) for backend in backends.values())
    except RuntimeError:  # the group is being closed
        return None


def sum_over_ranks(values: torch.Tensor, world: World) -> torch.Tensor:
    """Returns the element-wise sum of `values` over all ranks, on the CPU.

    Args:
        values: A float64 tensor, of the same shape on every rank.
        world: This rank's place; alone, nothing is sent.
    """
    return _reduced(values, world, dist.ReduceOp.SUM)


def max_over_ranks(values: torch.Tensor, world: World) -> torch.Tensor:
    """Returns the element-wise maximum of `values` over all ranks, on the CPU; see `sum_over_ranks`."""
    return _reduced(values, world, dist.ReduceOp.MAX)


def _reduced(values: torch.Tensor, world: World, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    found = values.to("cpu", copy=True)
    if world.world_size > 1:
        dist.all_reduce(found, operation)
    return found


def attach(resource: AbstractContextManager[Any]) -> None:
    """Enters a context, to be left just before the process group closes, with the error if there is one."""
    _attached.enter_context(resource)


@contextmanager
def opening(address: str) -> Iterator[None]:
    """Sets variables that Gloo and NCCL read while a group is opened; what the user has set stands.

    Both are to use the interface with that address, instead of guessing by host name, or taking the first one. torch's
    threads beside NCCL are not to end the process, for a collective's error, for CUDA's, or because one of them stands
    still: they would before the rank could say what it met (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp has these
    variables, and `ErrorHandlingMode`). Ranks that stand still are found by the driver.
    """
    name = _interface_of(address) if address else None
    wanted = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    if "NCCL_ASYNC_ERROR_HANDLING" not in os.environ:  # its older name
        wanted["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if name is not None:
        wanted |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # NCCL takes a prefix without the "="
    ours = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            os.environ.pop(key, None)


def _calm_gloo() -> None:
    """Keeps Gloo's event loop from preempting the threads that compute and send.

    Where another thread holds a connection's lock, the loop spins until it is free. If it has just
    preempted that very thread, it spins until its time slice is over, which is several steps of a
    small model. As a batch thread it wakes up as fast on an idle core and preempts nobody.
    """
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended, or this system has no batch threads
            if (task / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _interface_of(address: str) -> str | None:
    """Returns the name of the network interface that has the IPv4 address, or `None`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
