"""The line between driver and ranks: one store, several ends, in one process."""

from __future__ import annotations

import gc
import itertools
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from sparktorch.base.world import World
from sparktorch.distributed.client import Cancelled, Client, PeerFailure
from sparktorch.distributed.monitor import Timeouts
from sparktorch.distributed.server import ControlServer
from sparktorch.distributed.store import SealedStore, connect
from sparktorch.errors import ColumnError, RankError, RankLostError, RankStalledError
from tests.dist.distributed.conftest import client_of
from tests.support.ranks import HOST, cause_of_death, control_server, watch
from tests.support.waiting import until


class Answered(SealedStore):
    """Whose `set` has arrived when it returns: torch's is not answered, and another client may read before it."""

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        assert self.check([key])  # is answered, and has not overtaken it


@pytest.fixture
def clients(server: ControlServer) -> list[Client]:
    meeting = server.rendezvous

    def opened() -> SealedStore:
        store = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False)
        return Answered(meeting.prefix, store)

    return [Client(opened, World(rank=rank, world_size=3, host=f"host-{rank}")) for rank in range(3)]


def in_threads(calls: list[Callable[[], Any]]) -> list[Future[Any]]:
    futures: list[Future[Any]] = [Future() for _ in calls]

    def settle(future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    for future, call in zip(futures, calls, strict=True):
        threading.Thread(target=settle, args=(future, call), daemon=True).start()  # one that hangs must not keep us
    assert not wait(futures, timeout=30).not_done, "a call hangs"
    return futures


def test_the_driver_hears_of_every_epoch_exactly_once(server: ControlServer, clients: list[Client]) -> None:
    assert server.new_epochs() == []
    clients[0].epoch_done(1, {"epoch": 1, "loss": 0.5})
    assert server.new_epochs() == [{"epoch": 1, "loss": 0.5}]
    assert server.new_epochs() == []
    for number in (2, 3, 4):
        clients[0].epoch_done(number, {"epoch": number})
    assert [record["epoch"] for record in server.new_epochs()] == [2, 3, 4]
    assert server.new_epochs() == []


def test_a_cancelled_fit_reaches_ranks_that_wait_for_others(server: ControlServer, clients: list[Client]) -> None:
    first, second, _ = clients
    waiting = in_threads([partial(first.agree, "shard", {}), partial(second.agree, "shard", {}), server.cancel])
    for rank in waiting[:2]:
        with pytest.raises(Cancelled):
            rank.result()


def test_a_failed_rank_frees_those_that_wait_for_it(server: ControlServer, clients: list[Client]) -> None:
    first, second, third = clients
    error = ColumnError("column 'a' has 3 null values", column="a")
    second.enter("loading")
    waiting = in_threads(
        [partial(first.agree, "shard", {}), partial(second.fail, error), partial(third.agree, "shard", {})]
    )
    for rank in (waiting[0], waiting[2]):
        with pytest.raises(PeerFailure):
            rank.result()
    failure, primary = server.first_failure()
    assert primary
    assert failure is not None
    assert failure.to_dict() == error.at(rank=1, host="host-1").to_dict()


@pytest.mark.parametrize(
    "consequence",
    [
        PeerFailure("another rank failed"),
        Cancelled("the fit was cancelled"),
        RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:38211"),
        dist.DistStoreError("wait timeout after 1000ms"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_cause_goes_before_its_consequences_whenever_it_is_told(
    consequence: Exception, server: ControlServer, clients: list[Client]
) -> None:
    assert server.first_failure() == (None, False)
    clients[0].fail(consequence)
    found, primary = server.first_failure()
    assert (type(found), primary) == (RankError, False)
    clients[2].enter("training", epoch=2, step=9)
    clients[2].fail(ZeroDivisionError("division by zero"))
    failure, primary = server.first_failure()
    assert primary
    assert failure is not None
    assert failure.what == "ZeroDivisionError while training: division by zero"
    assert failure.where == {"rank": 2, "host": "host-2", "epoch": 2, "step": 9}


def test_of_two_causes_the_first_is_told(server: ControlServer, clients: list[Client]) -> None:
    clients[1].fail(ModuleNotFoundError("No module named 'nets'"))
    clients[0].fail(ValueError("second"))
    failure, _ = server.first_failure()
    assert failure is not None
    assert failure.where["rank"] == 1
    assert "your own modules and sparktorch shipped with --py-files" in failure.hint


def test_a_rank_beats_while_it_works_and_carries_its_place(server: ControlServer, clients: list[Client]) -> None:
    assert server.beats(3) == [None, None, None]
    clients[1].enter("training", epoch=3, step=14)
    with clients[1].beating():
        missing, beat, other = server.beats(3)
    assert missing is other is None
    assert beat is not None
    assert beat.items() >= {"host": "host-1", "phase": "training", "epoch": 3, "step": 14}.items()
    assert "sparktorch-beat" not in {thread.name for thread in threading.enumerate()}


def test_a_dead_rank_is_one_that_arrived_reported_nothing_and_beats_no_more(
    server: ControlServer, clients: list[Client]
) -> None:
    for client in clients:
        client.enter("training", epoch=1, step=2)
    clients[0].fail(RuntimeError("Connection reset by peer"))
    with clients[2].beating():
        dead = cause_of_death(server, 3)
    assert type(dead) is RankLostError
    assert (dead.where["rank"], dead.where["epoch"], dead.where["step"]) == (1, 1, 2)


def relate(client: Client, server: ControlServer, rank: int, **changes: Any) -> None:
    beat = server.beats(rank + 1)[rank]
    assert beat is not None
    client.store.set(f"beat/{rank}", json.dumps({**beat, **changes}))


def test_who_fell_silent_first_is_known_though_spark_ends_the_others_and_clocks_differ(
    server: ControlServer, clients: list[Client]
) -> None:
    for client in clients:
        client.enter("training", epoch=1, step=2)
    relate(clients[1], server, 1, time=time.time() + 60)
    with suppress(KeyboardInterrupt), clients[2].beating():
        clients[0].fail(RuntimeError("Connection reset by peer"))
        raise KeyboardInterrupt  # Spark ends rank 2
    dead = cause_of_death(server, 3)
    assert type(dead) is RankLostError
    assert dead.where["rank"] == 1


def test_the_first_rank_to_fail_looks_who_is_silent_and_none_ends_before_it_has(
    server: ControlServer, clients: list[Client]
) -> None:
    for client in clients:
        client.enter("training", epoch=1, step=2)
    with ThreadPoolExecutor(2) as pool:
        failing = [pool.submit(client.fail, RuntimeError("Connection reset by peer")) for client in clients[:2]]
        for each in as_completed(failing):
            each.result()
            assert server.silent_peers() == {2}


@pytest.mark.parametrize("rank", range(3))
def test_of_ranks_without_a_word_the_one_is_dead_whose_task_spark_saw_end_first(
    rank: int, server: ControlServer, clients: list[Client]
) -> None:
    for client in clients:
        client.enter("training", epoch=1, step=2)
    message = f"barrier task ResultTask(7, {rank}) finished unsuccessfully. Python worker exited unexpectedly"
    assert cause_of_death(server, 3, message).where["rank"] == rank


def test_a_rank_that_freezes_while_it_waits_is_the_one_that_stands_still(
    server: ControlServer, clients: list[Client]
) -> None:
    for client in clients[:2]:
        client.enter("waiting")
    relate(clients[1], server, 1, waiting=True)
    seen = watch(server, 2, Timeouts(stall=1.0))
    beats = itertools.count(1)

    def look_until_it_is_told() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            relate(clients[0], server, 0, waiting=True, time=next(beats))
            seen.look()
            time.sleep(0.05)

    with pytest.raises(RankStalledError, match="rank 1 does not answer: 1 s ago it was waiting"):
        look_until_it_is_told()


def test_the_driver_knows_when_rank_0_trains(server: ControlServer, clients: list[Client]) -> None:
    seen = watch(server, 2)
    for phase, trains in (("loading", False), ("training", True), ("validating", False), ("running", True)):
        clients[0].enter(phase)
        clients[1].enter("training")

        def heard(phase: str = phase) -> bool:
            seen.look()
            return 0 in seen._pulses and seen._pulses[0].record["phase"] == phase

        until(heard, seconds=20, what="the driver has heard of the phase")
        assert seen.is_training == trains


def test_counters_that_a_stranger_moves_and_values_that_he_forges_hold_nobody_up(
    server: ControlServer, clients: list[Client]
) -> None:
    clients[1].warn("the disk is full")
    meeting = server.rendezvous
    stranger = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False)
    (key,) = [key for key in stranger.list_keys() if "warning" in key]
    for counter in ("warnings", "errors", "lines/1"):
        stranger.add(key.replace("warning/1/0", counter), 10**9)
    stranger.set(key, "forged")
    clients[1].warn("still full")
    clients[1].fail(ValueError("mine"))
    assert [warning["text"] for warning in server.new_warnings(server.beats(3))] == ["still full"]
    assert server.new_lines(server.beats(3)) == []
    failure, primary = server.first_failure()
    assert failure is not None
    assert (primary, failure.where["rank"]) == (True, 1)


def test_the_store_listens_on_the_one_address_it_was_bound_to() -> None:
    with control_server() as server:
        port = server.rendezvous.port
        socket.create_connection((HOST, port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        assert server.beats(1) == [None]  # whose reader holds the store
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), timeout=5)


def test_a_clients_connections_close_with_the_last_reference_to_it(server: ControlServer) -> None:
    gc.disable()  # or it would close them, some day
    try:
        client = client_of(server)
        store = weakref.ref(client.store)
        del client
        assert store() is None
    finally:
        gc.enable()


def test_a_rank_that_is_not_heard_of_any_more_is_given_up(clients: list[Client]) -> None:
    for client in clients[:2]:
        client.post("saved", {})
    with clients[0].beating(), clients[1].beating(), suppress(KeyboardInterrupt), clients[2].beating():
        raise KeyboardInterrupt  # rank 2 has come, and posts nothing
    with clients[0].beating(), clients[1].beating():
        (given_up,) = in_threads([partial(clients[0].collect, "saved", patience=1.5)])
    with pytest.raises(PeerFailure, match=r"rank 2 has not been heard of for 2 s"):
        given_up.result()


def test_a_rank_that_has_ended_is_not_given_up_while_another_one_works(clients: list[Client]) -> None:
    def post_late() -> None:
        with clients[1].beating():
            time.sleep(3)
            clients[1].post("saved", {"rank": 1})

    with clients[2].beating():
        clients[2].post("saved", {"rank": 2})
    clients[0].post("saved", {"rank": 0})
    with clients[0].beating():
        found, _ = in_threads([partial(clients[0].collect, "saved", patience=1.5), post_late])
    assert found.result() == [{"rank": rank} for rank in range(3)]


class SlowHeart(Client):
    """Whose heart stops for a while between what it has to say and saying it."""

    begun = threading.Event()

    @staticmethod
    def _set(store: SealedStore, key: str, value: dict[str, Any]) -> None:
        if threading.current_thread().name == "sparktorch-beat" and not value.get("ended", True):
            SlowHeart.begun.set()
            time.sleep(1)
        store.set(key, json.dumps(value))


def test_nothing_that_a_rank_sends_overtakes_that_it_has_ended(server: ControlServer) -> None:
    meeting = server.rendezvous
    opened = partial(connect, meeting.host, meeting.port, token=meeting.prefix)
    with SlowHeart(opened, World()).beating():
        assert SlowHeart.begun.wait(20)
    (beat,) = server.beats(1)
    assert beat is not None
    assert beat["ended"]
    assert server.have_ended([0])


def test_a_pause_is_answered_while_the_connection_of_the_training_waits(server: ControlServer) -> None:
    client, other = (client_of(server, patience=120) for _ in range(2))
    client.pause.begin(1)
    with client.beating():
        waiting = threading.Thread(target=client.store.get, args=("of the process group",), daemon=True)
        waiting.start()
        server.pause()
        (told,) = in_threads([partial(other.read, "pause")])
        assert told.result() == {"step": 1}
        assert waiting.is_alive()
        other.store.set("of the process group", "")
        waiting.join()


def test_an_error_of_more_text_than_the_store_takes_is_told_shortened(
    server: ControlServer, clients: list[Client]
) -> None:
    clients[1].fail(ValueError("begin " + 5_000_000 * "\u00e4\u20ac" + " end"))
    failure, primary = server.first_failure()
    assert primary
    assert failure is not None
    assert failure.what.startswith("ValueError while starting: begin")
    assert failure.what.endswith(" end")
    assert "more characters" in failure.what
    assert server.silent_peers() == set()


def test_an_error_does_not_replace_that_the_fit_was_cancelled(server: ControlServer, clients: list[Client]) -> None:
    clients[1].store.claim("first", "mine")
    clients[2].store.claim("first", "too late")
    assert clients[0].store.peek("first") == b"mine"
    server.cancel()
    clients[1].fail(ValueError("mine"))
    with pytest.raises(Cancelled):
        clients[0].read("never")


def test_work_and_printed_lines_are_progress_of_code_that_reports_none(
    server: ControlServer, clients: list[Client]
) -> None:
    def moves_after(action: Callable[[], object]) -> int:
        clients[0].beat(clients[0].store)
        before = server.beats(3)[0]
        action()
        clients[0].beat(clients[0].store)
        after = server.beats(3)[0]
        assert before is not None
        assert after is not None
        return int(after["moves"]) - int(before["moves"])

    with clients[0]._console.overhearing():
        assert moves_after(spin) == 0
        clients[0].count_work()
        assert moves_after(spin) == 1
        assert moves_after(lambda: print("still here")) == 1
        assert moves_after(lambda: time.sleep(0.2)) == 0


def spin() -> None:
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
