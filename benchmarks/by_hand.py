"""What one writes without sparktorch: a careful DDP script, for `torchrun` and for `TorchDistributor`.

Run as `torchrun --nproc-per-node 2 by_hand.py DATA OUT EPOCHS BATCH`, `BATCH` the rows of one rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["MLP", "nothing", "train", "train_in_group"]

WIDTH = 100
LEARNING_RATE = 1e-3


class MLP(nn.Sequential):
    """100-256-1 with ReLU."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))


def train(data: str, out: str, epochs: int, batch: int) -> dict[str, float]:
    """Opens the process group, and trains as `train_in_group`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = train_in_group(data, out, epochs, batch)
    dist.destroy_process_group()
    return result


def train_in_group(data: str, out: str, epochs: int, batch: int) -> dict[str, float]:
    """Trains on this rank's files of a Parquet directory; rank 0 writes the state dict to `out`.

    Returns:
        Seconds of the training loop, its number of steps, and the last epoch's loss.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    files = sorted(Path(data).glob("*.parquet"))[rank::world_size]
    table = pa.concat_tables(pq.read_table(file, use_threads=False) for file in files).combine_chunks()
    features = _writable(table["features"].chunk(0).values).view(-1, WIDTH)
    label = _writable(table["label"].chunk(0))
    del table

    torch.manual_seed(0)
    module = DistributedDataParallel(MLP(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    criterion = nn.MSELoss()
    torch.manual_seed(rank)
    started = time.perf_counter()
    steps = 0
    for _ in range(epochs):
        loss_sum = torch.zeros(())
        for index in torch.randperm(len(label)).split(batch):
            optimizer.zero_grad()
            output = module(features.index_select(0, index)).squeeze(-1)
            loss = criterion(output, label.index_select(0, index))
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
            steps += 1
    seconds = time.perf_counter() - started
    if rank == 0:
        torch.save(module.module.state_dict(), out)
    dist.barrier()
    return {"loop": seconds, "steps": steps, "loss": float(loss_sum) * epochs / steps}


def nothing() -> None:
    """Does nothing, in place of training."""


def _writable(column: pa.Array) -> torch.Tensor:
    return torch.from_numpy(np.require(column.to_numpy(), requirements="W"))


if __name__ == "__main__":
    result = train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    if os.environ["RANK"] == "0":
        print(json.dumps(result), flush=True)
