"""How batches come to the device: the plain tensors that a tensor of any layout is made of, and their copies."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from sparktorch.base.devices import jagged, module_of, select, upload
from sparktorch.data.dataset.prefetch import ahead

if TYPE_CHECKING:
    from sparktorch.data.dataset.reader import Batch

__all__ = ["batch_bytes", "components", "moved", "rebuilt"]

_COPIED_AHEAD = 2  # batches: one that is being copied while another one waits


def moved(batches: Generator[Batch], device: torch.device) -> Generator[Batch]:
    """Returns batches of the CPU on a device; those on the way there are two at most, however many wait on the CPU.

    They are copied from pinned memory by a thread, in a stream beside that of the training, which waits for its batch
    there: the host does not.

    Args:
        batches: Closed with what is returned, in the thread.
        device: Theirs, in which case they pass, or an accelerator.
    """
    return batches if device.type == "cpu" else _moved(batches, device)


def _moved(batches: Generator[Batch], device: torch.device) -> Generator[Batch]:
    module, beside = module_of(device), _stream_beside(device)

    def copied() -> Generator[tuple[Batch, Any]]:
        select(str(device))
        with closing(batches), module.stream(beside):
            for batch in batches:
                yield _on_device(batch, device), beside.record_event()

    with closing(ahead(copied(), _COPIED_AHEAD)) as coming:
        for batch, copied_then in coming:
            training = module.current_stream(device)
            training.wait_event(copied_then)
            for tensor in _tensors(batch):
                for part in components(tensor):
                    part.record_stream(training)  # its memory is not reused before the training has read it
            yield batch


@cache
def _stream_beside(device: torch.device) -> Any:
    """Returns the one stream for copies: memory that was allocated in a stream is used again in the same one only."""
    return module_of(device).Stream(device)


def _on_device(batch: Batch, device: torch.device) -> Batch:
    """Returns a copy of a batch, begun in the current stream."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return upload(tensor, device)

    weight = None if batch.weight is None else copy(batch.weight)
    loss_weight = weight
    if batch.loss_weight is not batch.weight:
        loss_weight = None if batch.loss_weight is None else copy(batch.loss_weight)
    inputs = (rebuilt(tensor, copy, batch.lengths.get(place)) for place, tensor in enumerate(batch.inputs))
    return replace(
        batch,
        inputs=tuple(inputs),
        label=None if batch.label is None else copy(batch.label),
        weight=weight,
        loss_weight=loss_weight,
    )


def components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the strided tensors that hold what a tensor is: of a sparse or a jagged one several."""
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout is torch.jagged:
        nested: Any = tensor
        return nested.values(), nested.offsets()
    return (tensor,)


def rebuilt(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns a tensor of the same layout, of what becomes of its components.

    Args:
        tensor: Of any layout.
        change: Returns what becomes of one.
        lengths: Of the rows of a jagged one, int64 of shape `(rows,)`, on the CPU.
    """
    first, *more = (change(part) for part in components(tensor))
    if tensor.layout is torch.sparse_csr:
        columns, values = more
        return torch.sparse_csr_tensor(first, columns, values, tensor.shape, check_invariants=False)
    if tensor.layout is torch.jagged:
        return jagged(first, more[0], components(tensor)[1].diff() if lengths is None else lengths)
    return first


def batch_bytes(batch: Batch) -> int:
    """Returns the bytes of a batch's tensors."""
    return sum(part.nbytes for tensor in _tensors(batch) for part in components(tensor))


def _tensors(batch: Batch) -> list[torch.Tensor]:
    named = (*batch.inputs, batch.label, batch.weight, batch.loss_weight)
    return [tensor for tensor in named if tensor is not None]
