"""Device transfer: copies batches to the device in advance, on a stream of its own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from sparktorch.base.batch import Batch, components, rebuilt
from sparktorch.base.devices import module_of, select, upload
from sparktorch.data.dataset.prefetch import ahead

__all__ = ["moved"]

_COPIED_AHEAD = 2  # batches: one is copied while another one waits


def moved(batches: Generator[Batch], device: torch.device) -> Generator[Batch]:
    """Returns CPU batches on a device, at most two of them in advance; for the CPU, `batches` itself.

    A thread copies them from pinned memory on a stream of its own, and closes `batches` when the returned generator is
    closed. The training's stream waits for its batch; the host does not.
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
            for tensor in batch.tensors:
                for part in components(tensor):
                    part.record_stream(training)  # its memory is not reused before the training's stream has read it
            yield batch


@cache
def _stream_beside(device: torch.device) -> Any:
    """Returns the device's one stream for copies: torch reuses memory only on the stream that allocated it."""
    return module_of(device).Stream(device)


def _on_device(batch: Batch, device: torch.device) -> Batch:
    """Returns a copy of a batch on the device, made asynchronously on the current stream."""

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
