"""Collectives for users' functions: on tensors, NumPy arrays and numbers, compared before they run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from sparktorch.base.config import one_of
from sparktorch.base.devices import is_host
from sparktorch.base.world import World

__all__ = ["Collectives", "Reduction"]

Reduction = Literal["sum", "mean", "product", "min", "max"]
V = TypeVar("V")

# The bytes of a packed `_Call`; with torch's longest shapes, less than half of them are used.
_CALL_BYTES = 512


class Collectives:
    """The collectives of one rank; every rank calls the same ones, in the same order.

    Values are tensors on any device, NumPy arrays, or Python's numbers. Results are new values of the same kind, with
    the same dtype, on the same device; arguments do not change. Gradients do not flow through them.

    Before each collective, the ranks exchange its name, and dtype and shape of the value. If these do not go together,
    all ranks raise a `ValueError` that names the differences, instead of hanging.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, world: World) -> None:
        """Takes the rank's world; with more than one rank, the process group must be open."""
        self._world = world
        self.rank = world.rank
        self.world_size = world.world_size

    def barrier(self) -> None:
        """Waits until every rank has called it."""
        self._compare("barrier")

    def all_reduce(self, value: V, op: Reduction = "sum") -> V:
        """Returns the element-wise sum, mean, product, minimum or maximum of all ranks' values, on every rank.

        Args:
            value: Of the same dtype and shape on every rank.
            op: The operation; "mean" is for floating-point values, and booleans have "min" and "max" only.
        """
        return self._reduce("all_reduce", value, op)

    def reduce_scatter(self, value: V, op: Reduction = "sum") -> V:
        """Returns this rank's part of the `all_reduce` of a value, which is split along its first axis.

        Args:
            value: Of the same dtype and shape on every rank; its first axis is a multiple of the number of ranks.
            op: As in `all_reduce`.
        """
        return self._reduce("reduce_scatter", value, op)

    def all_gather(self, value: V) -> list[V]:
        """Returns the values of all ranks, in rank order, on every rank; their shapes and dtypes may differ."""
        calls = self._compare("all_gather", value)
        parts = [self._buffer(call, value if rank == self.rank else None) for rank, call in enumerate(calls)]
        if len({call.layout for call in calls}) > 1:
            # torch's all_gather needs equal dtypes and shapes.
            for source, part in enumerate(parts):
                dist.broadcast(_bytes(part), source)
        elif self.world_size > 1:
            dist.all_gather(list(map(_bytes, parts)), _bytes(_tensor(value)))
        return [call.value(part) for call, part in zip(calls, parts, strict=True)]

    def broadcast(self, value: V | None = None, source: int = 0) -> V:
        """Returns the value of one rank, on every rank.

        Args:
            value: The value; the other ranks may leave it out.
            source: The rank that has the value.
        """
        values = [value] if self.rank == source and value is not None else []
        call = self._compare(f"broadcast({self._rank_text(source)})", *values)[source]
        if call.kind == "nothing":
            raise ValueError(f"broadcast got no value in its source, rank {source}")
        part = self._buffer(call, *values)
        if self.world_size > 1:
            dist.broadcast(_bytes(part), source)
        return call.value(part)  # type: ignore[no-any-return]

    def scatter(self, values: Sequence[V] | None = None, source: int = 0) -> V:
        """Returns this rank's value from the list that one rank has.

        Args:
            values: One value per rank, of any shapes and dtypes; the other ranks may leave them out.
            source: The rank that has the values.
        """
        name = f"scatter({self._rank_text(source)})"
        if self.rank != source:
            self._compare(name)
            # The value's dtype and shape come first: the rank needs them to receive the value.
            packed = torch.empty(_CALL_BYTES, dtype=torch.uint8)
            dist.recv(packed, source)
            call = _Call.unpacked(packed)
            part = self._buffer(call)
            dist.recv(_bytes(part), source)
            return call.value(part)  # type: ignore[no-any-return]
        sent: Sequence[V] = () if values is None else values
        failed: str | None = None
        if len(sent) != self.world_size:
            failed = f"scatter got {len(sent)} values in its source, rank {source}, for {self.world_size} ranks"
        self._compare(name, *sent, failed=failed)
        for rank, value in enumerate(sent):
            if rank != source:
                dist.send(_Call.of("scatter", value).packed(), rank)
                dist.send(_bytes(_tensor(value)), rank)
        return _Call.of("scatter", sent[source]).value(_tensor(sent[source]).clone())  # type: ignore[no-any-return]

    def gather(self, value: V, target: int = 0) -> list[V] | None:
        """Returns the values of all ranks, in rank order, in one rank; `None` in the others.

        Args:
            value: This rank's value; shapes and dtypes may differ between ranks.
            target: The rank that gets the values.
        """
        calls = self._compare(f"gather({self._rank_text(target)})", value)
        if self.rank != target:
            dist.send(_bytes(_tensor(value)), target)
            return None
        parts = [self._buffer(call, value if rank == target else None) for rank, call in enumerate(calls)]
        for rank, part in enumerate(parts):
            if rank != target:
                dist.recv(_bytes(part), rank)
        return [call.value(part) for call, part in zip(calls, parts, strict=True)]

    def _rank_text(self, rank: int) -> str:
        """Returns a rank as text; refuses a rank that does not exist."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank}: they are 0 to {self.world_size - 1}")
        return f"rank {rank}"

    def _compare(
        self, name: str, *values: Any, failed: str | None = None, wait: timedelta | None = None
    ) -> list[_Call]:
        """Exchanges the ranks' calls of a collective, and returns them in rank order; raises if the calls differ.

        `failed` says why this rank's call is wrong. Such a rank raises only after the exchange, in which the others
        wait for it. The exchange may take `wait`, by default as long as any collective.
        """
        call = _Call(name, "nothing")
        error: Exception | None = None
        if failed is not None:
            call = _Call(name, "failed")
            error = ValueError(failed)
        elif values:
            try:
                # All values are checked, and the first one is compared.
                call, *_ = [_Call.of(name, value) for value in values]
            except TypeError as raised:
                call = _Call(name, "failed")
                error = raised
        calls = [call]
        if self.world_size > 1:
            calls = _exchange(call, self.world_size, wait)
        if error is not None:
            raise error
        for rank, peer in enumerate(calls):
            if peer.kind == "failed":  # The other rank reports the cause.
                raise dist.DistError(f"{name.partition('(')[0]}: rank {rank} cannot go on")
        if len({call.name for call in calls}) > 1:
            raise ValueError(f"the ranks are not at the same point: {_by_description(call.name for call in calls)}")
        return calls

    def _buffer(self, call: _Call, value: Any = None) -> torch.Tensor:
        """Returns a copy of this rank's value, or an empty tensor for the value of another rank."""
        if value is not None:
            return _tensor(value).clone()
        device = "cpu" if call.host else self._world.device
        return torch.empty(call.shape, dtype=getattr(torch, call.dtype), device=device)

    def _reduce(self, name: str, value: V, op: Reduction) -> V:
        """Returns the result of `all_reduce` or `reduce_scatter`, whichever has the `name`."""
        one_of("op", op, get_args(Reduction))
        tensor = _tensor(value)
        size = self.world_size
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        if (op == "mean" and is_whole) or (tensor.dtype is torch.bool and op not in ("min", "max")):
            raise TypeError(f"op={op!r} does not go together with {tensor.dtype}: convert it; for bool take min or max")
        calls = self._compare(f"{name}({op})", value)
        if len({call.layout for call in calls}) > 1:
            raise ValueError(f"{name} needs equal dtypes and shapes: {_by_description(map(str, calls))}")
        # No backend reduces all integers, and a half-precision sum may overflow.
        wide_dtype = tensor.dtype
        if is_whole:
            wide_dtype = torch.int64
        elif tensor.dtype.itemsize < 4:
            wide_dtype = torch.float32
        total = tensor.to(wide_dtype, copy=True)
        operation = getattr(dist.ReduceOp, "SUM" if op == "mean" else op.upper())
        if name == "all_reduce" and size > 1:
            dist.all_reduce(total, operation)
        elif name == "reduce_scatter":
            if not total.dim() or len(total) % size:
                raise ValueError(f"{name} got shape {tuple(total.shape)}, whose first axis {size} ranks cannot share")
            whole_value = total
            total = whole_value[: len(whole_value) // size].clone()
            if size > 1:
                # Newer versions of torch have the function under the first name.
                scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                scatter(total, whole_value, operation)
        if op == "mean":
            total = total / size
        return calls[self.rank].value(total.to(tensor.dtype))  # type: ignore[no-any-return]


class _Call(NamedTuple):
    """A rank's call of a collective, as the ranks exchange it.

    Attributes:
        name: The collective, with what all ranks must agree on, such as "all_reduce(sum)".
        kind: "tensor", "array" or "number"; "nothing" for a call without a value, "failed" for a wrong call.
        dtype: The value's dtype.
        shape: The value's shape.
        host: Whether the value lies in the host's memory.
    """

    name: str
    kind: str
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    host: bool = True

    @classmethod
    def of(cls, name: str, value: Any) -> _Call:
        tensor = _tensor(value)
        kind = "number"
        if isinstance(value, torch.Tensor):
            kind = "tensor"
        elif isinstance(value, np.ndarray):
            kind = "array"
        return cls(name, kind, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), is_host(tensor.device))

    def packed(self) -> torch.Tensor:
        """Returns the call as bytes of a fixed number, so that one collective exchanges the calls of all ranks."""
        return torch.frombuffer(bytearray(json.dumps(self).encode().ljust(_CALL_BYTES)), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, content: torch.Tensor) -> _Call:
        name, kind, dtype, shape, host = json.loads(content.numpy().tobytes())
        return cls(name, kind, dtype, tuple(shape), host)

    @property
    def layout(self) -> tuple[Any, ...]:
        """What must be equal in all ranks for torch to exchange their values at once."""
        return self.dtype, self.shape, self.host

    def value(self, tensor: torch.Tensor) -> Any:
        """Returns a tensor as a value of the call's kind."""
        if self.kind == "tensor":
            return tensor
        return tensor.numpy() if self.kind == "array" else tensor.item()

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}{'' if self.host else ' on a device'}"


def _exchange(call: _Call, ranks: int, wait: timedelta | None) -> list[_Call]:
    """Returns the calls of all ranks, in rank order; `wait` is how long that may take, see `Collectives._compare`."""
    packed = call.packed()
    parts = [torch.empty_like(packed) for _ in range(ranks)]
    # `dist.all_gather` has no argument for a time-out.
    group = dist.group.WORLD
    assert group is not None
    options = AllgatherOptions()
    if wait is not None:
        options.timeout = wait
    group.allgather([parts], [packed], options).wait()
    return [_Call.unpacked(part) for part in parts]


def _tensor(value: Any) -> torch.Tensor:
    """Returns a value as a detached, contiguous tensor, which may share its memory."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not hasattr(value, "to_local"):
        return value.detach().resolve_conj().resolve_neg().contiguous()
    if isinstance(value, np.ndarray):
        native = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])  # It copies only where it has to.
        return torch.from_numpy(native.reshape(value.shape))
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float | complex):
        return torch.from_numpy(np.asarray(value))
    layout = f" of layout {value.layout}" if isinstance(value, torch.Tensor) else ""
    raise TypeError(f"collectives take dense tensors, NumPy arrays and numbers, got {type(value).__name__}{layout}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def _by_description(descriptions: Iterable[str]) -> str:
    """Returns the ranks' descriptions as text; ranks with equal descriptions are named together."""
    ranks_of: dict[str, list[str]] = {}
    for rank, description in enumerate(descriptions):
        ranks_of.setdefault(description, []).append(str(rank))
    return "; ".join(
        f"{description} in {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks[:8])}"
        for description, ranks in ranks_of.items()
    )
