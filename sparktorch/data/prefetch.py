"""What the training will ask for next, made in a thread meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["ByEpoch", "ahead"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Made(Generic[T]):
    """An item, or how the making of items ended."""

    item: T | None = None
    error: BaseException | None = None
    last: bool = False


def ahead(items: Generator[T], depth: int) -> Generator[T]:
    """Yields what `items` yields, made in a thread that is at most so many items ahead.

    The thread begins with the first item that is asked for. It has ended when the generator has: exhausted,
    closed, or with the exception that making an item ended with.

    Args:
        items: Runs in the thread, and is closed there.
        depth: The most items that are made and not yet taken.
    """
    made: queue.SimpleQueue[_Made[T]] = queue.SimpleQueue()
    room, stop = threading.Semaphore(depth), threading.Event()

    def work() -> None:
        error = None
        try:
            room.acquire()
            for item in items:
                if stop.is_set():
                    break
                made.put(_Made(item))
                room.acquire()
                if stop.is_set():
                    break
        except BaseException as raised:
            error = raised
        items.close()
        made.put(_Made(error=error, last=True))

    thread = threading.Thread(target=work, name="sparktorch-prefetch")
    thread.start()
    try:
        while not (found := made.get()).last:
            room.release()
            yield found.item  # type: ignore[misc]
        if found.error is not None:
            raise found.error
    finally:
        stop.set()
        room.release()
        thread.join()


class ByEpoch(Generic[T]):
    """Something that each epoch needs when it begins, made while the one before is trained."""

    def __init__(self, make: Callable[[int], T]) -> None:
        """Takes what makes it for the epoch with that number."""
        self._make = make
        self._known: dict[int, T] = {}
        self._thread: threading.Thread | None = None

    def __getitem__(self, epoch: int) -> T:
        """Returns it for that epoch, and forgets it for those before."""
        if epoch not in self._known:
            self.close()
        for old in [known for known in list(self._known) if known < epoch]:
            self._known.pop(old, None)
        if epoch not in self._known:
            self._known[epoch] = self._make(epoch)
        return self._known[epoch]

    def begin(self, epoch: int) -> None:
        """Begins to make it in a thread, unless that is done or something is being made."""
        if epoch in self._known or (self._thread is not None and self._thread.is_alive()):
            return

        def work() -> None:
            with suppress(Exception):  # which whoever asks for it will meet himself
                self._known[epoch] = self._make(epoch)

        self._thread = threading.Thread(target=work, name="sparktorch-order")
        self._thread.start()

    def close(self) -> None:
        """Waits for what is being made."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
