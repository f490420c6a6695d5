"""Threads that make the next batches and orders of epochs, and copy batches to the device on a separate stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache
from typing import Any, Generic, TypeVar

import torch

from sparktorch.base.batch import Batch, components, rebuilt
from sparktorch.base.devices import module_of, select, upload

__all__ = ["ByEpoch", "on_device", "read_ahead"]

T = TypeVar("T")

_COPIED_AHEAD = 2  # One batch is copied while another one waits.


def _no_size(_: object) -> int:
    """Returns the size of an item where sizes do not matter."""
    return 0


def read_ahead(items: Generator[T], depth: int, *, size: Callable[[T], int] = _no_size, most: int = 0) -> Generator[T]:
    """Yields the items of a generator that runs in a thread, at most `depth` items ahead.

    The thread starts when the first item is requested, and closes `items`. It has ended when this generator ends:
    exhausted, closed, or by an exception of `items`, which is raised again here. `most` limits the total `size`
    of waiting items, assuming that the next item is as large as the last; one item is always made.
    """
    waiting: deque[tuple[T, int]] = deque()
    changed = threading.Condition()
    ended = stopped = False
    error: BaseException | None = None

    def has_room() -> bool:
        next_size = waiting[-1][1] if waiting else 0
        fits = sum(item_size for _, item_size in waiting) + next_size <= most
        return stopped or not waiting or (len(waiting) < depth and fits)

    def has_news() -> bool:
        return bool(waiting) or ended

    def work() -> None:
        nonlocal ended, error
        try:
            try:
                for item in items:
                    sized = item, size(item)
                    with changed:
                        waiting.append(sized)
                        changed.notify_all()
                        changed.wait_for(has_room)
                    if stopped:
                        break
            finally:
                items.close()
        except BaseException as raised:
            error = raised
        finally:
            with changed:
                ended = True
                changed.notify_all()

    thread = threading.Thread(target=work, name="sparktorch-prefetch")
    thread.start()
    try:
        while True:
            with changed:
                changed.wait_for(has_news)
                if not waiting:
                    break
                item, _ = waiting.popleft()
                changed.notify_all()
            yield item
        if error is not None:
            raise error
    finally:
        with changed:
            stopped = True
            changed.notify_all()
        thread.join()


def on_device(batches: Generator[Batch], device: torch.device) -> Generator[Batch]:
    """Returns CPU batches on a device, at most two of them in advance; for the CPU, `batches` itself.

    A thread copies them from pinned memory on a separate stream, and closes `batches` when the returned generator is
    closed. The training's stream waits for its batch; the host does not.
    """
    return batches if device.type == "cpu" else _on_accelerator(batches, device)


def _on_accelerator(batches: Generator[Batch], device: torch.device) -> Generator[Batch]:
    device_module = module_of(device)
    copy_stream = _copy_stream(device)

    def copies() -> Generator[tuple[Batch, Any]]:
        select(str(device))
        with closing(batches), device_module.stream(copy_stream):
            for batch in batches:
                yield _copy(batch, device), copy_stream.record_event()

    with closing(read_ahead(copies(), _COPIED_AHEAD)) as batches_with_events:
        for batch, copy_event in batches_with_events:
            training_stream = device_module.current_stream(device)
            training_stream.wait_event(copy_event)
            for tensor in batch.tensors:
                for part in components(tensor):
                    # Otherwise torch would reuse the memory before the training's stream has read it.
                    part.record_stream(training_stream)
            yield batch


@cache
def _copy_stream(device: torch.device) -> Any:
    """Returns the device's one stream for copies: torch reuses memory only on the stream that allocated it."""
    return module_of(device).Stream(device)


def _copy(batch: Batch, device: torch.device) -> Batch:
    """Returns a copy of a batch on the device, made asynchronously on the current stream."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return upload(tensor, device)

    weight = None if batch.weight is None else copy(batch.weight)
    # If both weights are one tensor, it is copied once.
    loss_weight = weight
    if batch.loss_weight is not batch.weight:
        loss_weight = None if batch.loss_weight is None else copy(batch.loss_weight)
    inputs = (rebuilt(tensor, copy, batch.lengths.get(position)) for position, tensor in enumerate(batch.inputs))
    return replace(
        batch,
        inputs=tuple(inputs),
        label=None if batch.label is None else copy(batch.label),
        weight=weight,
        loss_weight=loss_weight,
    )


class ByEpoch(Generic[T]):
    """A value per epoch, made in a thread while the previous epoch is trained; thread-safe."""

    def __init__(self, make: Callable[[int], T]) -> None:
        """Sets the function that makes the value of an epoch."""
        self._make = make
        self._values: dict[int, T] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __getitem__(self, epoch: int) -> T:
        """Returns the value of an epoch; makes it if there is none."""
        if not self._has_value(epoch):
            self.close()  # The thread may be making it.
        with self._lock:
            if epoch in self._values:
                return self._values[epoch]
        return self._store(epoch, self._make(epoch))

    def forget(self, before: int) -> None:
        """Drops the values of the epochs before `before`."""
        with self._lock:
            self._values = {epoch: value for epoch, value in self._values.items() if epoch >= before}

    def clear(self) -> None:
        """Drops all values, once the thread has ended."""
        self.close()
        with self._lock:
            self._values = {}

    def begin(self, epoch: int) -> None:
        """Starts to make a value in a thread, unless it exists or the thread is still making another value."""
        if self._has_value(epoch) or (self._thread is not None and self._thread.is_alive()):
            return

        def work() -> None:
            with suppress(Exception):  # `__getitem__` makes it again, and raises.
                self._store(epoch, self._make(epoch))

        self._thread = threading.Thread(target=work, name="sparktorch-order")
        self._thread.start()

    def close(self) -> None:
        """Waits for the thread to end."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _has_value(self, epoch: int) -> bool:
        with self._lock:
            return epoch in self._values

    def _store(self, epoch: int, value: T) -> T:
        """Stores a value unless there is one, and returns the stored value."""
        with self._lock:
            return self._values.setdefault(epoch, value)
