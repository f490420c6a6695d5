"""The networks of `benchmarks.gpu`, and what one writes without sparktorch to train them: a careful DDP script.

Run as `torchrun --nproc-per-node 2 gpu_by_hand.py TASK`, `TASK` the fields of `Task` as a JSON object. Each rank reads
its files of Parquet into the memory of its device, and draws its batches there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["NETS", "Bert", "ResNet", "Task", "train"]

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Returns a convolution and its batch normalisation."""
    kernel = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(kernel, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """Three convolutions, the stride in the second, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            convolution(width, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(rows, inputs, height, width)` to `(rows, outputs, height / stride, width / stride)`."""
        return torch.relu_(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet (He et al. 2016, https://arxiv.org/abs/1512.03385) over bytes; ResNet-50 unless told otherwise."""

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))
        stages: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                channels = width * 2**stage
                stages.append(Bottleneck(inputs, channels, 2 if stage and not block else 1))
                inputs = 4 * channels
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Maps uint8 `(rows, 3, height, width)` to `(rows, classes)`."""
        x = (pixels.float() - 127.5) / 63.75
        scores: torch.Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return scores


class Bert(nn.Module):
    """BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805) over one segment; BERT-base unless told otherwise."""

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocabulary: int = 30_522,
        positions: int = 512,
        classes: int = 2,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.norm = nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.1))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps int64 `(rows, length)` to `(rows, classes)`, by what becomes of the first token."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.encoder(self.norm(self.words(tokens) + self.positions(positions)))
        scores: torch.Tensor = self.head(x[:, 0])
        return scores


NETS: dict[str, type[nn.Module]] = {"ResNet": ResNet, "Bert": Bert}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train, on what.

    Attributes:
        net: A name in `NETS`.
        params: Keyword arguments of the network.
        files: Parquet files with the columns `features` and `label`; each rank takes its share.
        shape: Of one row's features.
        batch: Rows of one rank in a step.
        epochs: Passes over the rows; the first one warms up.
        optimizer: A class in `torch.optim`.
        optimizer_params: Its keyword arguments.
        channels_last: How images and weights are laid out.
        device: "cpu", or a type of accelerator.
        precision: "bf16", "fp16" or "fp32".
    """

    net: str
    params: dict[str, Any]
    files: list[str]
    shape: list[int]
    batch: int
    epochs: int
    optimizer: str
    optimizer_params: dict[str, Any]
    channels_last: bool
    device: str
    precision: str


def train(task: Task) -> dict[str, float]:
    """Trains as one rank of `torchrun`.

    Returns:
        Mean seconds of a step after the first epoch, and the last epoch's loss.
    """
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    device, rank = open_group(task.device)
    pixels, labels = (tensor.to(device) for tensor in tensors(task.files[rank :: dist.get_world_size()], task.shape))

    torch.manual_seed(0)
    module = NETS[task.net](**task.params).to(device)
    layout = torch.channels_last if task.channels_last else torch.contiguous_format
    module = module.to(memory_format=layout)  # type: ignore[call-overload]
    parallel = DistributedDataParallel(module, gradient_as_bucket_view=True) if dist.get_world_size() > 1 else module
    make = getattr(torch.optim, task.optimizer)
    optimizer = make(module.parameters(), fused=True, **task.optimizer_params)
    scaler = torch.amp.GradScaler(device.type, enabled=task.precision == "fp16")
    criterion = nn.CrossEntropyLoss()
    torch.manual_seed(rank)
    took, loss_sum = [], torch.zeros((), device=device)
    for _ in range(task.epochs):
        started = time.perf_counter()
        loss_sum.zero_()
        steps = torch.split(torch.randperm(len(labels), device=device), task.batch)
        for index in steps:
            optimizer.zero_grad()
            rows = pixels.index_select(0, index)
            if task.channels_last:
                rows = rows.contiguous(memory_format=layout)
            with torch.autocast(device.type, HALVES.get(task.precision), enabled=task.precision in HALVES):
                output = parallel(rows)
            loss = criterion(output.float(), labels.index_select(0, index))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            loss_sum += loss.detach()
        loss_sum.item()  # This waits for the device.
        took.append((time.perf_counter() - started) / len(steps))
    dist.barrier()
    dist.destroy_process_group()
    return {"step": sum(took[1:]) / len(took[1:]), "loss": float(loss_sum) / len(steps)}


def open_group(kind: str) -> tuple[torch.device, int]:
    """Opens the process group as one does by hand; returns this rank's device and its number."""
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu"), dist.get_rank()
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    torch.get_device_module(kind).set_device(device)
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device)
    return device, dist.get_rank()


def tensors(files: Sequence[str], shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what some files hold: features `(rows, *shape)`, uint8 or int64, and int64 labels `(rows,)`."""
    tables = [pq.read_table(file, use_threads=False) for file in files]
    features = np.concatenate([values(chunk) for table in tables for chunk in table["features"].chunks])
    labels = np.concatenate([table["label"].to_numpy() for table in tables])
    return torch.from_numpy(features).view(-1, *shape), torch.from_numpy(labels)


def values(chunk: pa.Array) -> npt.NDArray[Any]:
    """Returns the elements of all rows, bytes or numbers."""
    if pa.types.is_list(chunk.type):
        return np.asarray(chunk.flatten(), np.int64)
    offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset :][: len(chunk) + 1]
    return np.frombuffer(chunk.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]


if __name__ == "__main__":
    result = train(Task(**json.loads(sys.argv[1])))
    if os.environ["RANK"] == "0":
        print(json.dumps(result), flush=True)
