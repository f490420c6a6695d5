"""Ranks whose driver has gone, or stands still, end by themselves."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.server import ControlServer
from sparktorch.distributed.store import Rendezvous, connect
from tests.support.ranks import HOST, SPAWN

pytestmark = pytest.mark.landing

PATIENCE = 3.0


def drive(pipe: Connection) -> None:
    """Hosts the store of an attempt, and after SIGUSR1, at the same port, that of another one."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    with closing(ControlServer(HOST, HOST)) as server, closing(server.server_for_next_task()):
        pipe.send(server.rendezvous)
        server.send(b"a task")
        signal.pause()
    os.environ["SPARKTORCH_PORTS"] = str(server.rendezvous.port)
    with closing(ControlServer(HOST, HOST)):
        time.sleep(600)


def hang(rendezvous: Rendezvous, pipe: Connection, said: Path) -> None:
    opened = partial(connect, rendezvous.host, rendezvous.port, token=rendezvous.prefix)
    client = Client(opened, World(), patience=PATIENCE)
    sys.stderr = said.open("w")
    with client.joined(next(client.orders())).beating():
        pipe.send("beating")
        time.sleep(600)


@pytest.fixture
def driver_and_rank(tmp_path: Path) -> tuple[BaseProcess, BaseProcess]:
    ours, theirs = SPAWN.Pipe()
    driver = SPAWN.Process(target=drive, args=(theirs,), daemon=True)
    driver.start()
    rank = SPAWN.Process(target=hang, args=(ours.recv(), theirs, tmp_path / "said"), daemon=True)
    rank.start()
    assert ours.recv() == "beating"
    return driver, rank


@pytest.mark.parametrize(
    ("how", "calm", "why"),
    [
        (signal.SIGKILL, 0.0, "not been heard of for driverTimeout (3 s)"),
        (signal.SIGSTOP, 2 * PATIENCE, "not been heard of for driverTimeout (3 s)"),
        (signal.SIGUSR1, PATIENCE, "has gone, or has given up the fit"),
    ],
)
def test_a_rank_ends_where_its_driver_is_dead_or_stands_still_or_begins_another_attempt(
    how: signal.Signals, calm: float, why: str, driver_and_rank: tuple[BaseProcess, BaseProcess], tmp_path: Path
) -> None:
    driver, rank = driver_and_rank
    rank.join(calm)
    assert rank.is_alive(), "as long as the driver lives"
    assert driver.pid is not None
    os.kill(driver.pid, how)
    rank.join(5 * PATIENCE)
    assert rank.exitcode == 1
    assert why in (tmp_path / "said").read_text()
    driver.kill()
    driver.join()
