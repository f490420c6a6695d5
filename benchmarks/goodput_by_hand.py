"""What `benchmarks.goodput` compares with: a DDP script with checkpoints, as torchrun's elastic agent wants it.

Run as `torchrun goodput_by_hand.py DATA FOLDER EPOCHS SECONDS`. Every 20 steps rank 0 writes a checkpoint, by
`torch.save` and a rename; a process that is started reads the last one, and goes on in the middle of its epoch.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["BATCH", "INTERVAL", "ROWS", "STEP_SECONDS", "Log"]

ROWS, BATCH, INTERVAL, STEP_SECONDS = 20_000, 1000, 20, 0.05


class Log:
    """Says which process is a rank, and when rank 0 has done which step; makes a step last so many seconds."""

    def __init__(self, folder: Path, rank: int, seconds: float) -> None:
        self._folder, self._rank, self._seconds = folder, rank, seconds
        self._begun = time.monotonic()
        (folder / f"pid-{rank}").write_text(str(os.getpid()))

    def step(self, number: int) -> None:
        """Notes that a step, by its number from 1, has ended."""
        time.sleep(max(0.0, self._begun + self._seconds - time.monotonic()))
        self._begun = time.monotonic()
        if self._rank == 0:
            with (self._folder / "steps").open("a") as file:
                file.write(f"{time.time()} {number}\n")


def train(data: Path, folder: Path, epochs: int, seconds: float) -> None:
    """Trains on this rank's part of every batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size, saved = dist.get_rank(), dist.get_world_size(), folder / "checkpoint.pt"
    table = pq.read_table(data).combine_chunks()
    features = torch.from_numpy(np.array(table["features"].chunk(0).values)).view(len(table), -1)
    label = torch.from_numpy(np.array(table["label"].chunk(0)))
    module = _module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    done = 0
    if saved.exists():
        state = torch.load(saved)
        module.module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    log, per_epoch = Log(folder, rank, seconds), -(-len(label) // BATCH)
    for step in range(done, epochs * per_epoch):
        order = torch.randperm(len(label), generator=torch.Generator().manual_seed(step // per_epoch))
        index = order[step % per_epoch * BATCH :][:BATCH][rank::size]
        optimizer.zero_grad()
        nn.functional.mse_loss(module(features[index]).squeeze(-1), label[index]).backward()
        optimizer.step()
        log.step(step + 1)
        if rank == 0 and (step + 1) % INTERVAL == 0:
            state = {"module": module.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "checkpoint.new")
            (folder / "checkpoint.new").rename(saved)
    if rank == 0:
        torch.save(module.module.state_dict(), folder / "weights.pt")
    dist.destroy_process_group()


def _module() -> Any:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 1)))


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
