"""How batches come to the device: the plain tensors that a tensor of any layout is made of, and their copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sparktorch.data.shard import Batch

__all__ = ["Move", "batch_bytes", "components", "move_to", "rebuilt"]


class Move(Protocol):
    """Brings batches to the device: begun in the thread that makes them, finished in that of the training."""

    def begin(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """Begins to copy a batch."""
        ...

    def finish(self, begun: tuple[Batch, torch.cuda.Event | None]) -> Batch:
        """Returns the copy, for the training to use."""
        ...


def move_to(device: str) -> Move:
    """Returns how batches on the CPU come to a device."""
    target = torch.device(device)
    return _ToGpu(target) if target.type == "cuda" else _Here()


def components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the strided tensors that hold what a tensor is: of a sparse or a jagged one several."""
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout is torch.jagged:
        jagged: Any = tensor
        return jagged.values(), jagged.offsets()
    return (tensor,)


def rebuilt(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns a tensor of the same layout, of what becomes of its components."""
    first, *more = (change(part) for part in components(tensor))
    if tensor.layout is torch.sparse_csr:
        columns, values = more
        return torch.sparse_csr_tensor(first, columns, values, tensor.shape, check_invariants=False)
    return torch.nested.nested_tensor_from_jagged(first, more[0]) if tensor.layout is torch.jagged else first


def batch_bytes(batch: Batch) -> int:
    """Returns the bytes of a batch's tensors."""
    return sum(part.nbytes for tensor in _tensors(batch) for part in components(tensor))


def _tensors(batch: Batch) -> list[torch.Tensor]:
    named = (*batch.inputs, batch.label, batch.weight, batch.loss_weight)
    return [tensor for tensor in named if tensor is not None]


class _Here:
    """Leaves batches where they are."""

    def begin(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        return batch, None

    def finish(self, begun: tuple[Batch, torch.cuda.Event | None]) -> Batch:
        return begun[0]


class _ToGpu:
    """Copies batches from pinned memory to a GPU, in a stream beside that of the training."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's is untyped

    def begin(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        with torch.cuda.stream(self._stream):
            copy = replace(
                batch,
                inputs=tuple(rebuilt(tensor, self._copy) for tensor in batch.inputs),
                label=None if batch.label is None else self._copy(batch.label),
                weight=None if batch.weight is None else self._copy(batch.weight),
                loss_weight=None if batch.loss_weight is None else self._copy(batch.loss_weight),
            )
            return copy, self._stream.record_event()

    def finish(self, begun: tuple[Batch, torch.cuda.Event | None]) -> Batch:
        batch, copied = begun
        assert copied is not None
        training = torch.cuda.current_stream(self._device)
        training.wait_event(copied)
        for tensor in _tensors(batch):
            for part in components(tensor):
                part.record_stream(training)  # its memory is not reused before the training has read it
        return batch

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)
