"""Work done ahead in a thread: the same items, no further ahead than asked for, and an end to the thread."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import closing
from typing import Any

import pytest

from sparktorch.data.dataset.prefetch import ByEpoch, read_ahead


class Source:
    """Counts from 0; knows how far it got, and in which thread it was closed."""

    def __init__(self, stop: int, *, error: BaseException | None = None) -> None:
        self._stop, self._error = stop, error
        self.made = 0
        self.grown = threading.Condition()
        self.closed_in: str | None = None

    def items(self) -> Generator[int]:
        try:
            for number in range(self._stop):
                with self.grown:
                    self.made += 1
                    self.grown.notify()
                yield number
            if self._error is not None:
                raise self._error
        finally:
            self.closed_in = threading.current_thread().name

    def wait_for(self, made: int) -> None:
        with self.grown:
            assert self.grown.wait_for(lambda: self.made >= made, 20)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sparktorch")]


@pytest.mark.parametrize("depth", [1, 2, 50])
@pytest.mark.parametrize("stop", [0, 1, 7])
def test_the_items_come_in_their_order(stop: int, depth: int) -> None:
    source = Source(stop)
    assert list(read_ahead(source.items(), depth)) == list(range(stop))
    assert source.closed_in == "sparktorch-prefetch"
    assert not threads()


@pytest.mark.parametrize(
    "limits", [{"depth": 3}, {"depth": 50, "size": lambda _: 10, "most": 35}], ids=["items", "room for them"]
)
def test_it_is_no_further_ahead_than_asked_for(limits: dict[str, Any]) -> None:
    source = Source(100)
    with closing(read_ahead(source.items(), **limits)) as items:
        assert [next(items) for _ in range(10)] == list(range(10))
        source.wait_for(13)
        assert source.made <= 13
    assert source.made <= 14, "what was being made when it was closed"
    assert source.closed_in == "sparktorch-prefetch"
    assert not threads()


def test_an_error_comes_after_the_items_before_it() -> None:
    items = read_ahead(Source(3, error=ZeroDivisionError("on purpose")).items(), 9)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        next(items)
    assert not threads()


def test_nothing_is_made_before_the_first_item_is_asked_for() -> None:
    source = Source(5)
    read_ahead(source.items(), 2).close()
    assert source.made == 0
    assert not threads()


def test_what_an_epoch_needs_is_made_once_and_ahead_and_kept_until_the_training_is_past_it() -> None:
    made = []

    def make(epoch: int) -> str:
        made.append((epoch, threading.current_thread() is threading.main_thread()))
        return f"epoch {epoch}"

    found = ByEpoch(make)
    assert found[0] == "epoch 0"
    found.begin(1)
    found.begin(0)
    assert [found[1], found[1], found[3]] == ["epoch 1", "epoch 1", "epoch 3"]
    assert made == [(0, True), (1, False), (3, True)]
    found.forget(1)
    assert [found[1], found[0]] == ["epoch 1", "epoch 0"]
    assert made[3:] == [(0, True)]
    found.close()
    assert not threads()


def test_an_error_ahead_is_met_by_who_asks() -> None:
    def make(epoch: int) -> int:
        return 1 // (1 - epoch)

    found = ByEpoch(make)
    found.begin(1)
    assert found[0] == 1
    with pytest.raises(ZeroDivisionError):
        found[1]
    found.close()
