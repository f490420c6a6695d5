"""Collectives for users' functions: on tensors, NumPy arrays and numbers, compared before they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from sparktorch.base.devices import is_host
from sparktorch.base.world import World
from sparktorch.distributed.values import (
    OPERATIONS,
    Reduction,
    as_bytes,
    as_tensor,
    check_operation,
    like,
    operation_of,
    reducible,
)

__all__ = ["Collectives", "Reduction"]

V = TypeVar("V")

_LONG = timedelta(days=365)  # ranks may end hours after each other

_NAMES = ("barrier", "all_reduce", "all_gather", "broadcast", "reduce_scatter", "scatter", "gather")
_POINTS = ("loader", "wrap", "state_dict", "return")  # of a function, that all ranks reach together
_KINDS = ("nothing", "tensor", "array", "number")
_DTYPES: tuple[torch.dtype, ...] = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
    *(torch.uint16, torch.uint32, torch.uint64),
)
_MOST_AXES = 8


class Collectives:
    """The collectives of one rank; every rank calls the same ones, in the same order.

    Values are tensors on any device, NumPy arrays, or Python's numbers. Results are new values of the same kind, with
    the same dtype, on the same device; arguments do not change. Gradients do not flow through them.

    Before each collective, the ranks exchange what they call it with: its name, and dtype and shape of the value. If
    these do not go together, all ranks raise a `ValueError` that names the differences, instead of hanging.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, world: World) -> None:
        """Takes the rank's place; with more than one rank, the process group is open."""
        self._world = world
        self.rank, self.world_size = world.rank, world.world_size

    def barrier(self) -> None:
        """Waits until every rank has called it."""
        self._headers("barrier", None)

    def all_reduce(self, value: V, op: Reduction = "sum") -> V:
        """Returns the element-wise sum, mean, product, minimum or maximum of all ranks' values, on every rank.

        Args:
            value: Of the same dtype and shape on every rank.
            op: The operation; "mean" is for floating-point values, and booleans have "min" and "max" only.
        """
        operation = operation_of(op)
        tensor = as_tensor(value)
        check_operation(op, tensor)
        self._check_equal(self._headers("all_reduce", value, code=list(OPERATIONS).index(op)))
        wide = reducible(tensor, op)
        if self.world_size > 1:
            dist.all_reduce(wide, operation)
        return like(value, self._mean(wide, op).to(tensor.dtype))

    def reduce_scatter(self, value: V, op: Reduction = "sum") -> V:
        """Returns this rank's part of the `all_reduce` of a value, which is split along its first axis.

        Args:
            value: Of the same dtype and shape on every rank; its first axis is a multiple of the number of ranks.
            op: As in `all_reduce`.
        """
        operation = operation_of(op)
        tensor = as_tensor(value)
        check_operation(op, tensor)
        self._check_equal(self._headers("reduce_scatter", value, code=list(OPERATIONS).index(op)))
        if not tensor.dim() or len(tensor) % self.world_size:
            raise ValueError(
                f"reduce_scatter got shape {tuple(tensor.shape)}, whose first axis {self.world_size} ranks cannot share"
            )
        wide = reducible(tensor, op)
        part = wide[: len(wide) // self.world_size].clone()
        if self.world_size > 1:
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(part, wide, operation)
        return like(value, self._mean(part, op).to(tensor.dtype))

    def all_gather(self, value: V) -> list[V]:
        """Returns the values of all ranks, in rank order, on every rank; their shapes and dtypes may differ."""
        headers = self._headers("all_gather", value)
        if self.world_size == 1:
            return [like(value, as_tensor(value).clone())]
        if len({header.layout for header in headers}) == 1:
            own = as_bytes(as_tensor(value))
            parts = [torch.empty_like(own) for _ in headers]
            dist.all_gather(parts, own)
            return [self._value(part, header) for part, header in zip(parts, headers, strict=True)]
        found = []
        for source, header in enumerate(headers):
            part = as_bytes(as_tensor(value)) if source == self.rank else self._room(header)
            dist.broadcast(part, source)
            found.append(self._value(part, header))
        return found

    def broadcast(self, value: V | None = None, source: int = 0) -> V:
        """Returns the value of one rank, on every rank.

        Args:
            value: The value; the other ranks may leave it out.
            source: The rank that has it.
        """
        self._check_rank(source)
        header = self._headers("broadcast", value if self.rank == source else None, code=source, whole=False)[source]
        if header.kind == "nothing":
            raise ValueError(f"broadcast got no value in its source, rank {source}")
        part = as_bytes(as_tensor(value)).clone() if self.rank == source else self._room(header)
        if self.world_size > 1:
            dist.broadcast(part, source)
        found: V = self._value(part, header)
        return found

    def scatter(self, values: Sequence[V] | None = None, source: int = 0) -> V:
        """Returns this rank's one of the values of one rank.

        Args:
            values: One value per rank, of any shapes and dtypes; the other ranks may leave them out.
            source: The rank that has them.
        """
        self._check_rank(source)
        failed = None
        if self.rank == source and (values is None or len(values) != self.world_size):
            given = "no values" if values is None else f"{len(values)} values"
            failed = ValueError(f"scatter got {given} in its source, rank {source}, for {self.world_size} ranks")
        self._headers("scatter", None, code=source, failed=failed)
        if self.rank != source:
            fields = torch.zeros(_Header.SIZE, dtype=torch.int64)
            dist.recv(fields, source)
            header = _Header.from_fields(fields)
            part = self._room(header)
            dist.recv(part, source)
            received: V = self._value(part, header)
            return received
        assert values is not None
        for rank, value in enumerate(values):
            if rank != source:
                dist.send(_Header.of("scatter", value).fields(), rank)
                dist.send(as_bytes(as_tensor(value)), rank)
        return like(values[source], as_tensor(values[source]).clone())

    def gather(self, value: V, target: int = 0) -> list[V] | None:
        """Returns the values of all ranks, in rank order, in one rank; `None` in the others.

        Args:
            value: This rank's value; shapes and dtypes may differ between ranks.
            target: The rank that gets them.
        """
        self._check_rank(target)
        headers = self._headers("gather", value, code=target)
        own = as_tensor(value)
        if self.rank != target:
            dist.send(as_bytes(own), target)
            return None
        found: list[V] = []
        for rank, header in enumerate(headers):
            part = as_bytes(own).clone() if rank == target else self._room(header)
            if rank != target:
                dist.recv(part, rank)
            found.append(self._value(part, header))
        return found

    def _mean(self, total: torch.Tensor, op: Reduction) -> torch.Tensor:
        return total / self.world_size if op == "mean" else total

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank}: they are 0 to {self.world_size - 1}")

    def _headers(
        self, name: str, value: Any, *, code: int = 0, whole: bool = True, failed: Exception | None = None
    ) -> list[_Header]:
        """Exchanges what the ranks call a collective with; raises if they call different ones, or one cannot go on.

        Args:
            name: The collective.
            value: This rank's value, or `None`.
            code: The operation, or the rank that the collective is from or to.
            whole: Whether every rank needs a value.
            failed: Why this rank cannot go on.
        """
        try:
            own = _Header.of(name, value, code)
        except (TypeError, ValueError) as error:
            own, failed = _Header(name, "nothing"), error
        if failed is not None:
            own.code = -1
        headers = [own]
        if self.world_size > 1:
            fields = own.fields()
            parts = [torch.empty_like(fields) for _ in range(self.world_size)]
            _gathered(parts, fields, wait=_LONG if name == "return" else None)
            headers = [_Header.from_fields(part) for part in parts]
        if failed is not None:
            raise failed
        stopped = [rank for rank, header in enumerate(headers) if header.code == -1]
        if stopped:
            raise dist.DistError(f"{name}: rank {stopped[0]} cannot go on")  # that rank reports the cause
        calls = {(header.name, header.code) for header in headers}
        if len(calls) > 1:
            raise ValueError(f"the ranks are not at the same point: {_listed(h.call for h in headers)}")
        if whole and value is not None and any(header.kind == "nothing" for header in headers):
            raise ValueError(f"{name} got no value in some ranks")
        return headers

    def _check_equal(self, headers: list[_Header]) -> None:
        if len({header.layout for header in headers}) > 1:
            what = f"{headers[0].name} needs equal dtypes and shapes"
            raise ValueError(f"{what}: {_listed(header.described for header in headers)}")

    def _room(self, header: _Header) -> torch.Tensor:
        """Returns an empty buffer for a value of another rank, on the device it arrives at."""
        device = "cpu" if header.on_host else self._world.device
        return torch.empty(header.bytes, dtype=torch.uint8, device=device)

    def _value(self, content: torch.Tensor, header: _Header) -> Any:
        tensor = content.view(header.dtype).reshape(header.shape)
        if header.kind == "tensor":
            return tensor
        return tensor.numpy() if header.kind == "array" else tensor.item()


@dataclass
class _Header:
    """What a rank calls a collective with.

    Attributes:
        name: The collective.
        kind: Kind of the value, one of `_KINDS`.
        dtype: Its dtype.
        shape: Its shape.
        on_host: Whether it is on the CPU.
        code: The operation, or the rank that the collective is from or to; -1 if this rank cannot go on.
    """

    name: str
    kind: str
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    on_host: bool = True
    code: int = 0

    SIZE = 6 + _MOST_AXES

    @classmethod
    def of(cls, name: str, value: Any, code: int = 0) -> _Header:
        if value is None:
            return cls(name, "nothing", code=code)
        tensor = as_tensor(value)
        if tensor.dim() > _MOST_AXES:
            raise ValueError(f"{name} got a value with {tensor.dim()} axes; at most {_MOST_AXES} can be sent")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} got {tensor.dtype}, which cannot be sent")
        kind = "tensor" if isinstance(value, torch.Tensor) else "array" if isinstance(value, np.ndarray) else "number"
        return cls(name, kind, tensor.dtype, tuple(tensor.shape), is_host(tensor.device), code)

    @property
    def layout(self) -> tuple[Any, ...]:
        """What has to be equal for element-wise operations."""
        return self.kind == "nothing", self.dtype, self.shape, self.on_host

    @property
    def call(self) -> str:
        if self.name in _POINTS:
            return f"{self.name} after {self.code} saves"
        of = "" if self.name in ("all_gather", "barrier") else f"({self._code})"
        return f"{self.name}{of}"

    @property
    def _code(self) -> str:
        return list(OPERATIONS)[self.code] if "reduce" in self.name else f"rank {self.code}"

    @property
    def described(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} of shape {self.shape}{'' if self.on_host else ' on a device'}"

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def fields(self) -> torch.Tensor:
        """Returns the header as int64 of shape `(SIZE,)`."""
        codes = [
            (_NAMES + _POINTS).index(self.name),
            _KINDS.index(self.kind),
            _DTYPES.index(self.dtype),
            len(self.shape),
        ]
        shape = [*self.shape, *[0] * (_MOST_AXES - len(self.shape))]
        return torch.tensor([*codes, int(self.on_host), self.code, *shape])

    @classmethod
    def from_fields(cls, fields: torch.Tensor) -> _Header:
        name, kind, dtype, axes, on_host, code, *shape = fields.tolist()
        return cls((_NAMES + _POINTS)[name], _KINDS[kind], _DTYPES[dtype], tuple(shape[:axes]), bool(on_host), code)


def _gathered(parts: list[torch.Tensor], own: torch.Tensor, *, wait: timedelta | None) -> None:
    """Gathers as `dist.all_gather` does, which has no argument for how long it may take."""
    if wait is None:
        dist.all_gather(parts, own)
        return
    options = AllgatherOptions()
    options.timeout = wait
    group = dist.group.WORLD
    assert group is not None
    group.allgather([parts], [own], options).wait()


def _listed(descriptions: Any) -> str:
    """Returns one description per rank, as text; ranks with equal ones are named together."""
    found: dict[str, list[int]] = {}
    for rank, description in enumerate(descriptions):
        found.setdefault(description, []).append(rank)
    ranks = {text: f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of[:8]))}" for text, of in found.items()}
    return "; ".join(f"{text} in {ranks[text]}" for text in found)
