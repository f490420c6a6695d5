"""A parameter server: the master copies of whole tensors, their optimizer, and its connections to the ranks.

Gloo's own `send` and `recv` do not suit threads that must end: they do not return if the connection closes
in the middle of a message, and nothing else can wake a thread that waits in them.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from sparktorch.base.world import World

__all__ = ["Connection", "Message", "ParameterShare", "assign", "connect", "read_numbers", "write_numbers"]

_CONNECT_SECONDS = 60
_HELLO_SECONDS = 5
_TOKEN_BYTES = 16
# A connection to a host that has vanished fails after a minute and a half.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
_ALIGNED = 16  # The widest element of a tensor has so many bytes.
_CHANGING = ("lr", "weight_decay", "momentum", "betas")  # Schedules and callbacks set these while training.


def assign(sizes: Sequence[int], servers: int) -> list[int]:
    """Returns the index of a server for each tensor: largest tensors first, each to the server with least load."""
    load = [0] * servers
    chosen = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        chosen[index] = load.index(min(load))
        load[chosen[index]] += sizes[index]
    return chosen


def read_numbers(groups: Iterable[dict[str, Any]]) -> list[float]:
    """Returns the options of parameter groups that may change from step to step, in a fixed order."""
    return [float(n) for group in groups for name in _CHANGING if name in group for n in tree_leaves(group[name])]


def write_numbers(groups: Iterable[dict[str, Any]], numbers: Sequence[float]) -> None:
    """Writes numbers from `read_numbers` into groups with the same options."""
    left = iter(numbers)

    def next_number(_: float) -> float:
        return next(left)

    for group in groups:
        for name in _CHANGING:
            if name in group:
                group[name] = tree_map(next_number, group[name])


class Message:
    """A message buffer in host memory: numbers and gradients on the way to a server, parameters on the way back."""

    def __init__(self, like: Sequence[torch.Tensor], numbers: int, *, pinned: bool = False) -> None:
        """Allocates `bytes`, the buffer, for tensors like some and float64 numbers; pinned for a device's copies."""
        # Before the tensors stand a flag of the last message, flags of the gradients, and the numbers.
        head = 8 * (1 + len(like) + numbers)
        sizes = [head, *(tensor.nbytes for tensor in like)]
        padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        buffer = torch.zeros(sum(padded), dtype=torch.uint8)
        self.bytes = buffer.pin_memory() if pinned else buffer
        first, *parts = torch.split(self.bytes, padded)
        self._head = first[:head].view(torch.float64)
        self._tensors = [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, like, strict=True)
        ]

    @property
    def last(self) -> bool:
        """Whether this is the sender's last message."""
        return bool(self._head[0])

    @property
    def numbers(self) -> list[float]:
        """The values from `read_numbers`."""
        return self._head[1 + len(self._tensors) :].tolist()

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients, views of this buffer; `None` where the sender had none."""
        there = self._head[1 : 1 + len(self._tensors)].tolist()
        return [tensor if flag else None for flag, tensor in zip(there, self._tensors, strict=True)]

    def end(self) -> None:
        """Makes this the sender's last message."""
        self._head[0] = 1

    def push(self, numbers: Sequence[float], gradients: Sequence[torch.Tensor | None]) -> None:
        """Fills it with a step's numbers and gradients; copies from a device end with the stream's work."""
        there = [gradient is not None for gradient in gradients]
        self._head.copy_(torch.tensor([False, *there, *numbers], dtype=torch.float64))
        for tensor, gradient in zip(self._tensors, gradients, strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
                tensor.copy_(dense, non_blocking=not dense.is_cpu)

    @torch.no_grad()
    def store(self, parameters: Iterable[torch.Tensor]) -> None:
        """Fills it with parameters."""
        for tensor, parameter in zip(self._tensors, parameters, strict=True):
            tensor.copy_(parameter)

    @torch.no_grad()
    def load(self, parameters: Iterable[torch.Tensor]) -> None:
        """Copies the tensors into `parameters`; the buffer must not change before the device has finished."""
        for tensor, parameter in zip(self._tensors, parameters, strict=True):
            parameter.copy_(tensor, non_blocking=not parameter.is_cpu)


class ParameterShare:
    """The parameters of one server; each rank's pushes come from a separate thread.

    With staleness 0, the server waits for the gradients of all ranks and makes one update with their
    mean. Otherwise, each push is an update at once, with 1/N of the learning rate for N ranks: N small
    optimizer steps replace a large one. Each gradient is an estimate of the whole batch's. `failure` is the error
    of a thread that serves a rank.
    """

    def __init__(
        self, masters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, *, ranks: int, staleness: int | None
    ) -> None:
        """Takes the parameters to serve, on the CPU, their optimizer, and the bound, `None` for none."""
        self.failure: BaseException | None = None
        self._masters, self._optimizer, self._staleness = masters, optimizer, staleness
        self._changed = threading.Condition()
        self._clock = [0] * ranks  # It counts the pushes of each rank.
        self._version = 0  # It counts the updates.
        self._seen = [0] * ranks  # Each rank has the parameters of this version.
        self._waiting: dict[int, Message] = {}
        self._stale: list[int] = []

    def push(self, rank: int, frame: Message) -> None:
        """Takes a rank's gradients, waits until it may take its next step, and fills the frame with parameters."""
        try:
            with self._changed:
                self._clock[rank] += 1
                least = 0 if self._staleness is None else self._clock[rank] - self._staleness
                self._take(rank, frame)
                self._changed.notify_all()
                while self.failure is None and min(self._clock) < least:
                    self._changed.wait()
                if self.failure is not None:
                    raise self.failure
                frame.store(self._masters)
                self._seen[rank] = self._version
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Records why no more replies will come, and wakes the threads that wait for one."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def read(self, frame: Message) -> None:
        """Fills a frame with the parameters, which all ranks get; no rank may push meanwhile."""
        with self._changed:
            frame.store(self._masters)
            self._seen = [self._version] * len(self._seen)

    def take_staleness(self) -> list[int]:
        """Returns the staleness of each push since the last call: the number of updates its gradient had not seen."""
        with self._changed:
            taken, self._stale = self._stale, []
            return taken

    def _take(self, rank: int, frame: Message) -> None:
        self._stale.append(self._version - self._seen[rank])
        if self._staleness != 0:
            self._update(frame.gradients, frame.numbers, share=1 / len(self._clock))
            return
        self._waiting[rank] = frame
        if len(self._waiting) == len(self._clock):
            frames = [self._waiting[rank] for rank in sorted(self._waiting)]  # A fixed order makes sums reproducible.
            self._waiting = {}
            self._update(_mean([frame.gradients for frame in frames]), frame.numbers, share=1)

    def _update(self, gradients: Iterable[torch.Tensor | None], numbers: Sequence[float], *, share: float) -> None:
        groups = self._optimizer.param_groups
        write_numbers(groups, numbers)
        for group in groups:
            group["lr"] *= share
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        self._optimizer.step()
        self._version += 1


def _mean(pushes: Sequence[list[torch.Tensor | None]]) -> Iterator[torch.Tensor | None]:
    """Yields the mean of each tensor's gradients, a missing one being zero; `None` where all are missing."""
    for column in zip(*pushes, strict=True):
        total, *others = [gradient for gradient in column if gradient is not None] or [None]
        if total is not None:
            for gradient in others:
                total.add_(gradient)
            total.div_(len(pushes))
        yield total


class Connection:
    """One end of a connection. One thread sends and receives; any thread may shut it down."""

    def __init__(self, end: socket.socket) -> None:
        """Takes a connected socket."""
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._end = end

    def send(self, message: torch.Tensor) -> None:
        """Sends a uint8 tensor in host memory; raises a `DistNetworkError` if the connection is closed."""
        with _closed_by_peer():
            self._end.sendall(message.numpy().data)

    def receive(self, message: torch.Tensor) -> None:
        """Waits for a message, as `send` sends it, and fills a uint8 tensor in host memory with it."""
        left = message.numpy().data
        with _closed_by_peer():
            while left:
                count = self._end.recv_into(left)
                if not count:
                    raise ConnectionError("end of file")
                left = left[count:]

    def shut(self) -> None:
        """Shuts the connection down: its thread gets an error if it waits, and must close the connection."""
        with suppress(OSError):  # It may be closed already.
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; only this ends a peer's `send` that waits for buffer space."""
        self._end.close()


@contextmanager
def _closed_by_peer() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise dist.DistNetworkError(f"Connection closed by peer: {error}") from error


def connect(world: World, servers: Sequence[int]) -> tuple[dict[int, Connection], dict[int, Connection]]:
    """Connects every rank with every server but itself; each rank calls it, with the default group open.

    Returns:
        This rank's connections to servers, and its connections to the ranks that it serves, each by rank.
    """
    token, serves = secrets.token_bytes(_TOKEN_BYTES), world.rank in servers
    family = socket.AF_INET6 if ":" in world.address else socket.AF_INET
    listeners = [""] * world.world_size
    with closing(socket.socket(family)) as listener:
        if serves:
            listener.bind((world.address, 0))
            listener.listen(world.world_size)
        listening = f"{world.address or socket.gethostname()} {listener.getsockname()[1]} {token.hex()}"
        dist.all_gather_object(listeners, listening)
        ups = {server: _call(listeners[server], world.rank) for server in servers if server != world.rank}
        return ups, _accept(listener, token, world.world_size - 1) if serves else {}


def _call(listening: str, rank: int) -> Connection:
    """Connects a rank with a server, which listens at a host and a port, and wants a token."""
    host, port, token = listening.split()
    end = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
    end.sendall(bytes.fromhex(token) + rank.to_bytes(4, "big"))
    return Connection(end)


def _accept(listener: socket.socket, token: bytes, count: int) -> dict[int, Connection]:
    """Accepts the connections of `count` ranks, by rank; closes connections without the token."""
    lines: dict[int, Connection] = {}
    listener.settimeout(_CONNECT_SECONDS)
    while len(lines) < count:
        end, _ = listener.accept()
        end.settimeout(_HELLO_SECONDS)
        hello = b""
        with suppress(OSError):  # The peer may have left, or send nothing.
            hello = end.recv(len(token) + 4, socket.MSG_WAITALL)
        if len(hello) == len(token) + 4 and secrets.compare_digest(hello[: len(token)], token):
            lines[int.from_bytes(hello[len(token) :], "big")] = Connection(end)
        else:
            end.close()
    return lines
