"""A parameter server: the master copies of whole tensors, their optimizer, and each rank's number of pushes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Message", "ParameterShare", "assign", "read_numbers", "write_numbers"]

_ALIGNED = 16  # bytes: the widest element of a tensor
_CHANGING = ("lr", "weight_decay", "momentum", "betas")  # what schedules and callbacks set while training


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
    for group in groups:
        for name in _CHANGING:
            if name in group:
                group[name] = tree_map(lambda _: next(left), group[name])


class Message:
    """A message buffer in host memory: numbers and gradients on the way to a server, parameters on the way back."""

    def __init__(self, like: Sequence[torch.Tensor], numbers: int, *, pinned: bool = False) -> None:
        """Allocates `bytes`, the buffer, for tensors like some and float64 numbers; pinned for a device's copies."""
        head = 8 * (1 + len(like) + numbers)  # last-message flag, gradient flags, numbers
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
        self._clock = [0] * ranks  # pushes of each rank
        self._version = 0  # updates so far
        self._seen = [0] * ranks  # the version that each rank has
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
                self._changed.wait_for(lambda: self.failure is not None or min(self._clock) >= least)
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
            frames = [self._waiting[rank] for rank in sorted(self._waiting)]  # a fixed order makes sums reproducible
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
