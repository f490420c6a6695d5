"""The process group as a context: opened for a fit, closed after it, whatever happened inside."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparktorch.world import World

__all__ = ["attach", "collectives_begun", "max_over_ranks", "process_group", "sum_over_ranks"]

_SIOCGIFADDR = 0x8915

# The last group of this process, kept until the next one. Ending a group joins threads that may be
# waiting for the GIL: this reference lets go of it meanwhile, the one in DDP's reducer, which a
# traceback keeps alive, does not.
_kept: list[dist.ProcessGroup | None] = []

_attached = ExitStack()


@contextmanager
def process_group(world: World, store: dist.Store, *, timeout: timedelta, lone: bool = False) -> Iterator[None]:
    """Opens the default process group over `store` and closes it on the way out; alone, mostly does nothing.

    Reused Python workers keep module state: a group that an earlier job left open is closed first.

    Args:
        world: This rank's place.
        store: The store the ranks meet at.
        timeout: How long a collective may wait for the other ranks.
        lone: Open one for a rank that is alone, too.
    """
    if world.world_size == 1 and not lone:
        yield
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    with _gloo_interface(world.address):
        dist.init_process_group(
            world.backend,
            store=dist.PrefixStore("group", store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=torch.device(world.device) if world.backend == "nccl" else None,
        )
    _kept[:] = [dist.group.WORLD]
    _calm_gloo()
    try:
        with _attached:
            yield
    except BaseException:
        # Destroying waits for what is in flight, and that for peers which may do the same.
        world_group = dist.group.WORLD
        if world_group is not None:
            with suppress(RuntimeError):
                world_group.abort()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def collectives_begun() -> int | None:
    """Returns how many collectives this rank has begun, `None` without a process group.

    A rank that has begun fewer than the others is the one that they wait for.
    """
    group = dist.group.WORLD
    try:
        return None if group is None else int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
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
    if world.world_size == 1:
        return values.cpu()
    values = values.to(world.device, copy=True)
    dist.all_reduce(values, operation)
    return values.cpu()


def attach(resource: AbstractContextManager[Any]) -> None:
    """Enters a context, to be left just before the process group closes, with the error if there is one."""
    _attached.enter_context(resource)


@contextmanager
def _gloo_interface(address: str) -> Iterator[None]:
    """Makes Gloo listen on the interface with that address instead of guessing by host name."""
    name = _interface_of(address) if address else None
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is None or before is not None:  # the user's own choice stands
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


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
