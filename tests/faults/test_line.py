"""The line between a rank and its driver, slow, held up and cut."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import torch

from sparktorch.config import TrainConfig
from sparktorch.train.link import Link, connect
from sparktorch.train.recipe import Recipe
from sparktorch.worker import TrainJob
from sparktorch.world import World
from tests.support.frames import Table
from tests.support.nets import Score
from tests.support.programs import environment
from tests.support.proxy import Proxy
from tests.support.ranks import control_server, load_state, run_ranks, train_on

PATIENCE_SECONDS = 3.0


def linger(host: str, port: int, prefix: str) -> None:
    """Is a rank that is busy, and hears nothing of what happens to its line."""
    link = Link(partial(connect, host, port, prefix), World(), patience=PATIENCE_SECONDS)
    with link.beating():
        time.sleep(60)


def test_a_rank_that_is_cut_off_from_its_driver_ends_and_not_before_its_patience_does() -> None:
    with control_server() as server:
        proxy = Proxy(server.rendezvous.port)
        proxy.set("pass")
        meeting = server.rendezvous
        program = "from tests.faults.test_line import linger; linger({!r}, {!r}, {!r})"
        command = program.format(meeting.host, proxy.port, meeting.prefix)
        with subprocess.Popen([sys.executable, "-c", command], env=environment()) as rank:
            try:
                while server.beats(1) == [None]:
                    time.sleep(0.05)
                proxy.hold()
                time.sleep(PATIENCE_SECONDS / 3)
                proxy.release()
                time.sleep(PATIENCE_SECONDS)
                assert rank.poll() is None, "the line had healed in time"
                proxy.hold()
                assert rank.wait(PATIENCE_SECONDS + 10) == 1
            finally:
                rank.kill()
                proxy.close()


def test_a_slow_line_to_the_driver_changes_nothing_in_the_training() -> None:
    table = Table.random(200, weighted=True)
    parts = [part.batches() for part in table.parts(2)]
    config = TrainConfig(task="regression", batch_size=32, epochs=2)
    job = TrainJob(columns=table.columns, recipe=Recipe(module=Score), config=config, max_imbalance=None)
    calm, _ = train_on(parts, job)
    with control_server() as server:
        proxy = Proxy(server.rendezvous.port, delay=0.02)
        proxy.set("pass")
        server.rendezvous = replace(server.rendezvous, port=proxy.port)
        ended = run_ranks(server, parts, job)
        failure, _ = server.first_failure()
        proxy.close()
    assert failure is None
    assert ended[0].result is not None
    late = load_state(ended[0].result)
    assert all(torch.equal(late[name], value) for name, value in calm.items())
