"""What many ranks ask of the one store: the number of messages, not the time they take."""

from __future__ import annotations

import logging
import resource
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparktorch.distributed.heartbeat import beat_seconds, silent_seconds
from sparktorch.distributed.monitor import Timeouts
from sparktorch.distributed.server import ControlServer
from sparktorch.distributed.store import SealedStore, allow_connections
from sparktorch.errors import RankStalledError
from tests.dist.distributed.conftest import client_of
from tests.support.ranks import watch
from tests.support.waiting import until

RANKS = 20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the keys that `multi_get`, `peek` and `check` ask for, and the calls of each."""
    count: Counter[str] = Counter()
    for name in ("multi_get", "peek", "check"):
        method = getattr(SealedStore, name)

        def call(store: SealedStore, keys: str | list[str], name: str = name, method: object = method) -> object:
            count.update([name, *([keys] if isinstance(keys, str) else keys)])
            return method(store, keys)  # type: ignore[operator]

        monkeypatch.setattr(SealedStore, name, call)
    return count


def test_the_heartbeats_of_all_ranks_are_one_question(server: ControlServer, asked: Counter[str]) -> None:
    for rank in range(RANKS):
        client_of(server, rank, RANKS).enter("training", epoch=1, step=rank)
    asked.clear()
    steps = [beat and beat["step"] for beat in server.beats(RANKS)]
    assert steps == list(range(RANKS))
    assert (asked["multi_get"], asked["peek"], asked["check"]) == (1, 0, 0)


def test_ranks_that_agree_read_what_rank_0_has_gathered_and_none_the_keys_of_all(
    server: ControlServer, asked: Counter[str]
) -> None:
    clients = [client_of(server, rank, 6) for rank in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda client: client.agree("rows", {"of": client._world.rank}), clients))
    assert found == [[{"of": rank} for rank in range(6)]] * 6
    assert asked["rows/all/0"] == 5
    looks_of_rank_0 = asked["rows/0"]
    assert all(asked[f"rows/{rank}"] == looks_of_rank_0 for rank in range(6))


def test_ranks_that_pause_read_what_rank_0_has_gathered_and_none_the_keys_of_all(
    server: ControlServer, asked: Counter[str]
) -> None:
    clients = [client_of(server, rank, 6) for rank in range(6)]
    for rank, client in enumerate(clients):
        client.pause.begin(3 + rank % 2)
    for client in reversed(clients):
        client.pause.answer(client.store)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda client: client.pause.stops_after(3), clients)) == [False] * 6
    assert all(client.pause.stops_after(4) for client in clients)
    assert asked["pause"] == 6
    assert {asked[f"pause/{rank}"] for rank in range(6)} == {2}  # a check and a look


def test_a_value_that_is_not_there_is_seen_without_waiting_or_leaving_a_trace(server: ControlServer) -> None:
    store = client_of(server).store
    assert store.peek("topic") is None
    assert not store.check(["topic"])
    store.set("topic", "-")
    assert store.peek("topic") == b"-"


def test_lines_that_were_lost_on_their_way_do_not_keep_those_after_them_back(server: ControlServer) -> None:
    client = client_of(server)
    client._sent["lines"] += 1
    client._console.add(logging.INFO, "after them")
    client.beat(client.store)
    found = [line for _ in range(20) for line in server.new_lines(server.beats(1))]
    client._console.add(logging.INFO, "at once")
    client.beat(client.store)
    assert found == [(0, logging.INFO, "after them")]
    assert server.new_lines(server.beats(1)) == [(0, logging.INFO, "at once")]


def test_a_line_of_many_ranks_is_shown_once_with_their_number(
    server: ControlServer, caplog: pytest.LogCaptureFixture
) -> None:
    clients = [client_of(server, rank, RANKS) for rank in range(RANKS)]
    for rank, client in enumerate(clients):
        client._console.add(logging.WARNING, "the disk is full")
        if rank < 2:
            client._console.add(logging.WARNING, "of a few")
        client.beat(client.store)
    with caplog.at_level(logging.WARNING):
        watch(server, RANKS).listen()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["rank 0: the disk is full ... and 19 other ranks", "rank 0: of a few", "rank 1: of a few"]


@pytest.mark.parametrize(("started", "says"), [(1, "their Python still starts"), (0, "taken by other jobs?")])
def test_the_slots_are_asked_for_where_no_rank_has_one(
    started: int, says: str, server: ControlServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparktorch.distributed.monitor._WARN_SECONDS", 0.1)
    for rank in range(started):
        client_of(server, rank).enter("training")
    seen = watch(server, RANKS)
    monkeypatch.setattr(seen, "_is_starved", lambda: True)
    until(lambda: seen.look() or caplog.messages, seconds=20, what="the driver warns")
    assert says in caplog.messages[0]


def test_of_many_ranks_that_have_not_started_a_few_are_named(server: ControlServer) -> None:
    client_of(server, 0, RANKS).enter("training")
    seen = watch(server, RANKS, Timeouts(stall=0.2))
    with pytest.raises(
        RankStalledError, match=r"ranks \[1, 2, 3, 4, 5, 6, 7, 8\] and 11 others of 20 have not started"
    ):
        until(seen.look, seconds=20, what="the driver gives them up")


def test_the_driver_may_open_as_many_connections_as_its_ranks_need() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
        allow_connections(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, limits[1])
        allow_connections(512)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2048
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_many_ranks_beat_less_often_and_are_found_silent_within_seconds() -> None:
    assert beat_seconds(2) == beat_seconds(500) == 0.5
    assert beat_seconds(1024) == pytest.approx(1.0, abs=0.03)
    assert 2 * beat_seconds(1024) < silent_seconds(1024) < 3
