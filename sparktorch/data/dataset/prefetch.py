"""Makes in a thread what the training needs next."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["ByEpoch", "ahead"]

T = TypeVar("T")


def ahead(items: Generator[T], depth: int, *, size: Callable[[T], int] = lambda _: 0, most: int = 0) -> Generator[T]:
    """Yields the items of a generator that runs in a thread, at most `depth` items ahead.

    The thread starts when the first item is requested, and closes `items`. It has ended when this generator ends:
    exhausted, closed, or by an exception of `items`, which is raised again here. `most` limits the total size of
    waiting items, assuming that the next one is as large as the last; one item is always made.
    """
    made: deque[tuple[T, int]] = deque()
    changed = threading.Condition()
    ended = stopped = False
    error: BaseException | None = None

    def has_room() -> bool:
        if stopped or not made:
            return True
        return len(made) < depth and sum(each for _, each in made) + made[-1][1] <= most

    def work() -> None:
        nonlocal ended, error
        try:
            try:
                for item in items:
                    sized = item, size(item)
                    with changed:
                        made.append(sized)
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
                changed.wait_for(lambda: made or ended)
                if not made:
                    break
                item, _ = made.popleft()
                changed.notify_all()
            yield item
        if error is not None:
            raise error
    finally:
        with changed:
            stopped = True
            changed.notify_all()
        thread.join()


class ByEpoch(Generic[T]):
    """A value per epoch, made in a thread while the previous epoch is trained; thread-safe."""

    def __init__(self, make: Callable[[int], T]) -> None:
        """Sets the function that makes the value of an epoch."""
        self._make = make
        self._known: dict[int, T] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __getitem__(self, epoch: int) -> T:
        """Returns the value of an epoch; makes it if there is none."""
        if not self._knows(epoch):
            self.close()
        with self._lock:
            if epoch in self._known:
                return self._known[epoch]
        return self._keep(epoch, self._make(epoch))

    def forget(self, before: int) -> None:
        """Drops the values of the epochs before `before`."""
        with self._lock:
            self._known = {epoch: made for epoch, made in self._known.items() if epoch >= before}

    def clear(self) -> None:
        """Drops all values, once the thread has ended."""
        self.close()
        with self._lock:
            self._known = {}

    def begin(self, epoch: int) -> None:
        """Starts to make a value in a thread, unless it exists or the thread is still making another."""
        if self._knows(epoch) or (self._thread is not None and self._thread.is_alive()):
            return

        def work() -> None:
            with suppress(Exception):  # `__getitem__` makes it again, and raises
                self._keep(epoch, self._make(epoch))

        self._thread = threading.Thread(target=work, name="sparktorch-order")
        self._thread.start()

    def close(self) -> None:
        """Waits for the thread to end."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _knows(self, epoch: int) -> bool:
        with self._lock:
            return epoch in self._known

    def _keep(self, epoch: int, made: T) -> T:
        with self._lock:
            return self._known.setdefault(epoch, made)
