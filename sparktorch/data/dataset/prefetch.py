"""What the training will ask for next, made in a thread meanwhile."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["ByEpoch", "ahead"]

T = TypeVar("T")


def ahead(items: Generator[T], depth: int, *, size: Callable[[T], int] = lambda _: 0, most: int = 0) -> Generator[T]:
    """Yields what `items` yields, made in a thread that is at most so many items ahead.

    The thread begins with the first item that is asked for. It has ended when the generator has: exhausted,
    closed, or with the exception that making an item ended with.

    Args:
        items: Runs in the thread, and is closed there.
        depth: The most items that are made and not yet taken.
        size: Returns the size of an item.
        most: The sizes of items that are made and not yet taken sum up to no more than this, supposing that the
            next one has the size of the last; but one item is always made.
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
    """Something that each epoch needs when it begins, made while the one before is trained; for several threads."""

    def __init__(self, make: Callable[[int], T]) -> None:
        """Takes what makes it for the epoch with that number."""
        self._make = make
        self._known: dict[int, T] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __getitem__(self, epoch: int) -> T:
        """Returns it for that epoch."""
        if not self._knows(epoch):
            self.close()
        with self._lock:
            if epoch in self._known:
                return self._known[epoch]
        return self._keep(epoch, self._make(epoch))

    def forget(self, before: int) -> None:
        """Forgets it for the epochs before that one, which is trained now."""
        with self._lock:
            self._known = {epoch: made for epoch, made in self._known.items() if epoch >= before}

    def begin(self, epoch: int) -> None:
        """Begins to make it in a thread, unless that is done or something is being made."""
        if self._knows(epoch) or (self._thread is not None and self._thread.is_alive()):
            return

        def work() -> None:
            with suppress(Exception):  # which whoever asks for it will meet himself
                self._keep(epoch, self._make(epoch))

        self._thread = threading.Thread(target=work, name="sparktorch-order")
        self._thread.start()

    def close(self) -> None:
        """Waits for what is being made."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _knows(self, epoch: int) -> bool:
        with self._lock:
            return epoch in self._known

    def _keep(self, epoch: int, made: T) -> T:
        with self._lock:
            return self._known.setdefault(epoch, made)
