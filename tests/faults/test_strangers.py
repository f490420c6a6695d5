"""Strangers on the store while a job runs: they neither join it nor change what it ends with."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.server import ControlServer
from sparktorch.distributed.store import connect
from sparktorch.train.recipe.recipe import Recipe
from tests.support.frames import Table
from tests.support.nets import Score
from tests.support.ranks import control_server, load_state, run_ranks, train_job, train_on

TABLE = Table.random(300)
RANKS = 2
VALIDATION = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # how torch's own clients begin
SET = b"\x01"

Stranger = Callable[[ControlServer, threading.Event], int]  # returns how often it did something


class Unhurried(Score):
    """Leaves strangers time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 if self.training else 0)
        return super().forward(x)


JOB = train_job(TABLE, Recipe(module=Unhurried), TrainConfig(task="regression", batch_size=32, epochs=4))


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    state, _ = train_on([part.batches() for part in TABLE.parts(RANKS)], JOB)
    return state


def with_wrong_token(server: ControlServer, stop: threading.Event) -> int:
    meeting = server.rendezvous
    clients = [
        Client(partial(connect, meeting.host, meeting.port, "0" * 32), World(rank=rank, world_size=RANKS))
        for rank in range(RANKS)
    ]
    deeds = 0
    while not stop.wait(0.01):
        for client in clients:
            deeds += 1
            client.enter("training", epoch=9, step=9)
            client.post("shard", {"rows": 10**9, "validation": 0, "fingerprint": 0, "classes": []})
            client.progress(epoch=9, epochs=9, step=9, steps=9, loss=9.0)
            client.epoch_done(9, {"epoch": 9})
            client.fail(ValueError("from an earlier attempt"))
            client.store.set("cancel", "1")
        assert not clients[0].store.check(["ended/0"])
    return deeds


def who_lists_the_keys(server: ControlServer, stop: threading.Event) -> int:
    meeting = server.rendezvous
    store = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False)
    deeds = 0
    while not stop.wait(0.01):
        for key in store.list_keys():
            prefix, _, name = key.partition("/")
            assert prefix != meeting.prefix, "the token is nowhere to be read"
            if name.startswith(("beat/", "progress", "epoch/", "driver")):
                deeds += 1
                store.set(key, json.dumps({"epoch": 9, "epochs": 9, "step": 9, "steps": 9, "loss": 9.0}))
                store.set(f"{prefix}/warning/1", json.dumps({"rank": 0, "host": "x", "text": "made up"}))
                store.set(f"{prefix}/error/1", json.dumps({"kind": "RankError", "what": "made up", "secondary": False}))
    return deeds


def with_garbage(server: ControlServer, stop: threading.Event) -> int:
    meeting = server.rendezvous
    draw = random.Random(3)
    huge = struct.pack("<Q", 2**63 - 1)
    messages = [
        *(draw.randbytes(draw.randrange(1, 5000)) for _ in range(60)),
        *(VALIDATION + draw.randbytes(draw.randrange(1, 5000)) for _ in range(60)),
        *(VALIDATION + bytes([command]) + huge for command in range(20)),
        *(VALIDATION + bytes([command]) + struct.pack("<Q", 4) + b"key" for command in range(20)),
        VALIDATION + SET + struct.pack("<Q", 1) + b"k" + huge,
        VALIDATION + SET + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 9 << 20) + b"x" * 1000,
        VALIDATION[:3],
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ]
    with ExitStack() as stack:
        for message in messages:
            end = stack.enter_context(socket.create_connection((meeting.host, meeting.port), timeout=5))
            with suppress(OSError):  # it has been hung up on
                end.sendall(message)
        stop.wait()
    return len(messages)


def who_floods(server: ControlServer, stop: threading.Event) -> int:
    meeting = server.rendezvous
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(socket.create_connection((meeting.host, meeting.port), timeout=5))
        stop.wait()
    return 500


@contextmanager
def disturbed(server: ControlServer, stranger: Stranger) -> Iterator[None]:
    stop, deeds, errors = threading.Event(), [0], []

    def go() -> None:
        try:
            deeds[0] = stranger(server, stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    assert not errors, errors
    assert deeds[0] > 20


@pytest.mark.parametrize("stranger", [with_wrong_token, who_lists_the_keys, with_garbage, who_floods])
def test_a_job_ends_with_the_same_weights_whatever_a_stranger_does(
    stranger: Stranger, weights: dict[str, torch.Tensor]
) -> None:
    partitions = [part.batches() for part in TABLE.parts(RANKS)]
    with control_server() as server, disturbed(server, stranger):
        ended = run_ranks(server, partitions, JOB)
        told = server.new_epochs()
        failure, _ = server.first_failure()
        warnings = server.new_warnings(server.beats(RANKS))
    assert failure is None
    assert warnings == []
    assert {record["epoch"] for record in told} <= {1, 2, 3, 4}
    assert ended[0].result is not None
    state = load_state(ended[0].result)
    assert all(torch.equal(state[name], value) for name, value in weights.items())


def test_what_a_stranger_lays_down_for_a_rank_to_read_ends_the_job_with_an_error_that_says_so() -> None:
    with control_server() as server:
        meeting = server.rendezvous
        client = Client(partial(connect, meeting.host, meeting.port, meeting.prefix), World(rank=0, world_size=2))
        client.post("shard", {"rows": 1})
        stranger = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False)
        (key,) = [key for key in stranger.list_keys() if key.endswith("shard/0")]
        sealed = stranger.get(key)
        for content in ('{"rows": 1}', sealed.decode()):  # a seal holds for its key alone
            stranger.set(key.replace("shard/0", "shard/1"), content)
            stranger.check([key])
            with pytest.raises(Exception, match="somebody else has written 'shard/1' into the store") as caught:
                client.collect("shard")
            failure = client.fail(caught.value)
            assert "docs/security.md" in failure.hint
