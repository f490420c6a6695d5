"""The line between the driver and ranks that hold their rows: tasks, verdicts and results of any size."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch.distributed as dist

from sparktorch.distributed.client import Client
from sparktorch.distributed.server import ControlServer
from sparktorch.errors import ClusterError
from tests.support.waiting import until

LARGE = os.urandom(9 << 20)  # torch's store takes no value of more than 8 MiB


def test_tasks_and_results_of_any_size_arrive_as_they_are(server: ControlServer, clients: list[Client]) -> None:
    def rank(client: Client) -> list[int]:
        sizes = []
        for order in client.orders():
            own = client.joined(order)
            with own.beating():
                own.deliver({"size": len(order.content)}, order.content)
            sizes.append(len(order.content))
        return sizes

    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(rank, client) for client in clients]
        for content in (LARGE, b"", b"small"):
            with closing(server.server_for_next_task()) as task:
                server.send(content)
                until(lambda task=task: task.is_over(2), seconds=30, what="both have ended")  # type: ignore[misc]
                assert task.results(2) == [({"size": len(content)}, content)] * 2
        server.end_orders()
        assert [future.result(30) for future in ended] == [[len(LARGE), 0, 5]] * 2


def test_tasks_that_are_over_leave_nothing_in_the_store(server: ControlServer, clients: list[Client]) -> None:
    meeting = server.rendezvous
    looking = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False)
    tasks = clients[0].orders()
    counts = []
    for number in range(6):
        with closing(server.server_for_next_task()):
            server.send(b"work")
            own = clients[0].joined(next(tasks))
            with own.beating():
                own.warn("seen")
                own.progress(epoch=1)
                own.deliver({}, b"weights")
                print("in a task")
            if number % 2:
                own.fail(ValueError("after all"))
        own.progress(epoch=2)  # late, when the driver has gone on
        counts.append(len(looking.list_keys()))
    assert counts[5] == counts[3]
    assert counts[4] == counts[2]


def test_who_can_list_the_keys_cannot_write_the_result_of_a_task(server: ControlServer, clients: list[Client]) -> None:
    meeting = server.rendezvous
    with closing(server.server_for_next_task()) as task:
        server.send(b"work")
        looking = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False)
        read = b"".join(looking.get(key) for key in looking.list_keys() if "/order/" in key)
        assert read
        assert task.rendezvous.prefix.encode() not in read
        assert clients[0].joined(next(clients[0].orders())).store.check(["driver"])


def test_a_task_that_somebody_else_has_written_is_not_looked_at(server: ControlServer, clients: list[Client]) -> None:
    meeting = server.rendezvous
    server.send(b"work")
    stranger = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False)
    (key,) = [key for key in stranger.list_keys() if key.endswith("order/0/0")]
    stranger.set(key, "x" * 32 + "harm")
    with pytest.raises(ClusterError, match="somebody else has written"):
        next(clients[0].orders())


def test_ranks_wait_for_a_verdict_only_if_they_are_to(server: ControlServer, clients: list[Client]) -> None:
    assert not clients[0].told_to_stop(1)
    for client in clients:
        client.await_verdicts()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(client.told_to_stop, 1) for client in clients]
        server.judge(1, stop=False)
        assert [future.result(10) for future in asked] == [False, False]
        asked = [pool.submit(client.told_to_stop, 2) for client in clients]
        server.judge(2, stop=True)
        assert [future.result(10) for future in asked] == [True, True]
