"""The line between ranks and driver, slow and interrupted: a fit that waits for it ends as it would have."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import torch

from sparktorch.base.config import TrainConfig
from sparktorch.train.recipe.recipe import Recipe
from tests.support.frames import Table
from tests.support.nets import Score
from tests.support.proxy import Proxy
from tests.support.ranks import control_server, load_state, run_ranks, train_job, train_on
from tests.support.waiting import until

DELAY_SECONDS = 0.02
HELD_SECONDS = 3.0


def test_a_slow_line_to_the_driver_that_stands_still_for_seconds_changes_nothing() -> None:
    table = Table.random(200, weighted=True)
    parts = [part.batches() for part in table.parts(2)]
    config = TrainConfig(task="regression", batch_size=32, epochs=2)
    job = train_job(table, Recipe(module=Score), config)
    calm, _ = train_on(parts, job)
    with control_server() as server, closing(Proxy(server.rendezvous.port, delay=DELAY_SECONDS)) as proxy:
        proxy.set("pass")
        server.rendezvous = replace(server.rendezvous, port=proxy.port)

        def hold() -> float:
            # Once all are there, and long before they have agreed on a start.
            until(lambda: None not in server.beats(2), seconds=60, what="both ranks have begun")
            proxy.hold()
            begun = time.monotonic()
            time.sleep(HELD_SECONDS)
            proxy.release()
            return begun

        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(hold)
            ended = run_ranks(server, parts, job)
            after = time.monotonic()
        failure, _ = server.first_failure()
    assert failure is None
    assert after > held.result() + HELD_SECONDS, "the fit was over before the line stood still"
    assert ended[0].result is not None
    late = load_state(ended[0].result)
    assert all(torch.equal(late[name], value) for name, value in calm.items())
