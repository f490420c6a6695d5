"""A driver's store, and two ranks that are connected to it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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
    meeting = server.rendezvous
    opened = partial(connect, meeting.host, meeting.port, token=meeting.prefix)
    return [Client(opened, World(rank=rank, world_size=2, host=f"host-{rank}")) for rank in range(2)]
