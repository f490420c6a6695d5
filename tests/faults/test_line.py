"""The line between ranks and driver, slow and interrupted: a fit that waits for it ends as it would have."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import torch

from sparktorch.config import TrainConfig
from sparktorch.train.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Score
from tests.support.proxy import Proxy
from tests.support.ranks import control_server, load_state, run_ranks, train_on

DELAY_SECONDS = 0.02
HELD_SECONDS = 3.0


def test_a_slow_line_to_the_driver_that_stands_still_for_seconds_changes_nothing() -> None:
    table = Table.random(200, weighted=True)
    parts = [part.batches() for part in table.parts(2)]
    config = TrainConfig(task="regression", batch_size=32, epochs=2)
    job = TrainJob(columns=table.columns, recipe=Recipe(module=Score), config=config, max_imbalance=None)
    calm, _ = train_on(parts, job)
    with control_server() as server:
        proxy = Proxy(server.rendezvous.port, delay=DELAY_SECONDS)
        proxy.set("pass")
        server.rendezvous = replace(server.rendezvous, port=proxy.port)
        held: list[float] = []

        def hold() -> None:
            while None in server.beats(2):  # once all are there, and long before they have agreed on a start
                time.sleep(0.01)
            proxy.hold()
            begun = time.monotonic()
            time.sleep(HELD_SECONDS)
            held.append(begun)
            proxy.release()

        holder = threading.Thread(target=hold)
        holder.start()
        ended = run_ranks(server, parts, job)
        after = time.monotonic()
        holder.join()
        failure, _ = server.first_failure()
        proxy.close()
    assert failure is None
    assert after > held[0] + HELD_SECONDS, "the fit was over before the line stood still"
    assert ended[0].result is not None
    late = load_state(ended[0].result)
    assert all(torch.equal(late[name], value) for name, value in calm.items())
