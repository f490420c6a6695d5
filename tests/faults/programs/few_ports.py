"""Trains where every second port that a socket might get is taken already."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import torch

from sparktorch.base.config import TrainConfig
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Score
from tests.support.ranks import HOST, train_on

__all__ = ["main"]


def main() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    table = Table.random(300)
    with ExitStack() as stack:
        for port in range(low, high + 1, 2):
            stack.enter_context(socket.create_server((HOST, port)))
        for strategy, options in (("ddp", {}), ("parameterServer", {"staleness": 0, "servers": 2})):
            config = TrainConfig(task="regression", batch_size=32, epochs=2, strategy=strategy, strategy_params=options)
            job = TrainJob(columns=table.columns, recipe=Recipe(module=Score), config=config, max_imbalance=None)
            trained, _ = train_on([part.batches() for part in table.parts(2)], job)
            assert all(torch.isfinite(value).all() for value in trained.values())


if __name__ == "__main__":
    main()
