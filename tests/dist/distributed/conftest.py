"""A driver's store, and two ranks that are connected to it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.server import ControlServer
from sparktorch.distributed.store import connect
from tests.support.ranks import control_server


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with control_server() as started:
        yield started


@pytest.fixture
def clients(server: ControlServer) -> list[Client]:
    return [client_of(server, rank, 2) for rank in range(2)]


def client_of(server: ControlServer, rank: int = 0, size: int = 1, **options: Any) -> Client:
    meeting = server.rendezvous
    opened = partial(connect, meeting.host, meeting.port, token=meeting.prefix)
    return Client(opened, World(rank=rank, world_size=size, host=f"host-{rank}"), **options)
