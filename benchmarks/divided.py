"""What `estimator.plan` says of divided models, beside what others have published of theirs.

Nothing is measured here: operations, bubbles and bytes come from the code that makes a user's plan. Each group of
figures says its source, and what had to be assumed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.train.needs import Need, Plan
from sparktorch.train.plan import plan, reduced
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.mesh_options import MeshOptions

__all__ = ["Figure", "figures", "show"]

GBIT = 1e9 / 8


@dataclass(frozen=True)
class Figure:
    """A published figure, and what the plan predicts."""

    name: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1

    def __str__(self) -> str:
        return f"{self.name:44}{self.published:10.2f}{self.predicted:11.2f}{self.error:+8.0%}"


def figures() -> list[Figure]:
    """Returns all figures, in the order of the table."""
    return [*in_stages(), *of_vgg_16(), *in_parts(), *of_gpt_3()]


def show() -> dict[str, float]:
    """Prints the table; returns the predicted over the published figures, by name."""
    print(f"\n{'divided models':44}{'published':>10}{'predicted':>11}{'error':>8}")
    found = figures()
    for figure in found:
        print(figure)
    return {f"{each.name}: predicted / published": each.predicted / each.published for each in found}


# By numbers of stages and micro-batches, throughput of a Transformer of 48 layers on TPUs, relative to two stages and
# one micro-batch: Huang et al. 2018, https://arxiv.org/abs/1811.06965v5, table 2.
GPIPE = {(2, 4): 1.7, (2, 32): 1.8, (4, 4): 3.2, (4, 32): 3.4, (8, 4): 4.8, (8, 32): 6.3}


def in_stages() -> Iterator[Figure]:
    """Yields the speed of equal stages, relative to two of them and one micro-batch."""
    for (stages, micro_batches), published in GPIPE.items():
        seconds = []
        for size, count in ((2, 1), (stages, micro_batches)):
            options = MeshOptions(pipeline=size, micro_batches=count, schedule="gpipe")
            seconds.append(planned(Need(strategy="mesh", operations=10**9 // size, bubble=options.bubble), 1.0, 1.0))
        yield Figure(f"GPipe, {stages} stages, {micro_batches} micro-batches", published, seconds[0] / seconds[1])


# By machines with a Titan X each, speed of VGG-16 in as many stages, relative to one machine: PipeDream, Harlap et al.
# 2018, https://arxiv.org/abs/1806.03377, figure 13, "straight pipeline"; the values are from a summary of its text. It
# keeps versions of the weights instead of emptying the pipeline, and sends while it computes: no bubble, and nothing is
# waited for. It does not say where it cuts; assumed is where the stage with most operations has as few as can be. Its
# best figures, 7.04 on 8 machines and 9.86 on 16 (table 1), have copies of single stages, which no mesh of ours has.
PIPEDREAM = {
    4: (2.56, ("conv2_2", "conv3_3", "conv4_3")),
    8: (3.49, ("conv2_1", "conv3_1", "conv3_3", "conv4_2", "conv4_3", "conv5_1", "fc6")),
}


def of_vgg_16() -> Iterator[Figure]:
    """Yields the speed of VGG-16 in stages, relative to one machine."""
    first = Batch((torch.ones(2, 3, 224, 224),), torch.zeros(2, dtype=torch.int64), None, 2, names=("image",))
    for machines, (published, split) in PIPEDREAM.items():
        options = {"pipeline": machines, "split": list(split)}
        config = TrainConfig(task="classification", batch_size=32 * machines, strategy="mesh", strategy_params=options)
        needs = plan(Recipe(module=vgg_16, loss="CrossEntropyLoss", optimizer="SGD"), config, machines, first).needs
        alone = next(need.operations for need in needs if need.strategy == "ddp") * machines
        (need,) = (need for need in needs if need.options == options)
        staged = planned(replace(need, bubble=0.0, sent=0), 1.0, 1.0)
        yield Figure(f"PipeDream, VGG-16, {machines} stages", published, alone / staged)


def vgg_16() -> nn.Sequential:
    """Returns VGG-16 (Simonyan and Zisserman 2014, https://arxiv.org/abs/1409.1556, table 1, D)."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for block, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for number in range(1, count + 1):
            parts[f"conv{block}_{number}"] = nn.Conv2d(channels, width, 3, padding=1)
            parts[f"relu{block}_{number}"] = nn.ReLU()
            channels = width
        parts[f"pool{block}"] = nn.MaxPool2d(2)
    parts["flatten"] = nn.Flatten()
    for number, (inputs, outputs) in enumerate(((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)), 6):
        parts[f"fc{number}"] = nn.Linear(inputs, outputs)
        if number < 8:
            parts[f"relu{number}"], parts[f"drop{number}"] = nn.ReLU(), nn.Dropout()
    return nn.Sequential(parts)


# By GPUs that share layers: hidden size, layers and weak-scaling efficiency of GPT-2 on V100 GPUs of one server, where
# one GPU reaches 39 TFLOPS: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 5.1. In float16, rows of
# 1024 tokens, activations computed again. A V100 sends at most 150 GB/s through NVSwitch; collectives reach less.
MEGATRON = {2: (1920, 54, 0.95), 4: (2304, 64, 0.82), 8: (3072, 72, 0.77)}
MEGATRON_ROWS, MEGATRON_LENGTH, VOCABULARY = 8, 1024, 51_200
MEGATRON_SPEED, MEGATRON_BANDWIDTH = 39e12, 150e9


def in_parts() -> Iterator[Figure]:
    """Yields the efficiency of layers divided among GPUs of a server."""
    for size, (hidden, layers, published) in MEGATRON.items():
        whole = operations(MEGATRON_ROWS, MEGATRON_LENGTH, layers, hidden)
        # In each layer two all-reduces forward, again, and backward.
        sent = 6 * layers * reduced(MEGATRON_ROWS * MEGATRON_LENGTH * hidden * 2, size)
        need = Need(strategy="mesh", operations=int(whole / size), sent=sent)
        alone = need.operations / MEGATRON_SPEED
        yield Figure(f"Megatron-LM, {size} GPUs", published, alone / planned(need, MEGATRON_SPEED, MEGATRON_BANDWIDTH))


@dataclass(frozen=True)
class Gpt:
    """A model of Narayanan et al. 2021.

    Attributes:
        parameters: Their number.
        layers: Of the model.
        hidden: Size of a token in them.
        tensor: GPUs that share layers, under PTD-P.
        pipeline: Groups of these that have the layers one after another.
        ptd: By GPUs, rows of a step and teraFLOP/s of a GPU under PTD-P; micro-batches have one row.
        zero3: The same under ZeRO-3, with as many rows at once as a GPU has.
    """

    parameters: float
    layers: int
    hidden: int
    tensor: int
    pipeline: int
    ptd: dict[int, tuple[int, float]]
    zero3: dict[int, tuple[int, float]]


# Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, table 2; layers and hidden sizes by section 5.3.2 and table
# 1, rows of 2048 tokens. By section 5, a server has eight A100 GPUs and as many links of 200 Gbit/s; by section 4.1,
# eight GPUs share layers. Assumed are gradients and gathered parameters of two bytes, and the schedule without
# interleaving, of which the table says nothing. What a micro-batch takes, with what is sent for it, is the same on any
# number of GPUs; it follows from PTD-P on the fewest, to which all figures are relative.
GPT = {
    "175B": Gpt(
        174.6e9,
        96,
        12288,
        tensor=8,
        pipeline=12,
        ptd={384: (1536, 153), 768: (1536, 149), 1536: (1536, 141)},
        zero3={384: (1536, 144), 768: (1536, 88), 1536: (1536, 44)},
    ),
    "530B": Gpt(
        529.6e9,
        105,
        20480,
        tensor=8,
        pipeline=35,
        ptd={560: (2240, 171), 1120: (2240, 167), 2240: (2240, 159)},
        zero3={640: (2560, 138), 1120: (2240, 98), 2240: (2240, 48)},
    ),
}
GPT_LENGTH, GPT_BANDWIDTH = 2048, 200 * GBIT


def of_gpt_3() -> Iterator[Figure]:
    """Yields the throughput of a GPU on more of them, relative to PTD-P on the fewest."""
    for name, model in GPT.items():
        fewest = min(model.ptd)
        rows, most = model.ptd[fewest]
        need = pipelined(model, fewest, rows)
        computing = need.operations / (most * 1e12) - need.sent / GPT_BANDWIDTH
        speed = need.operations / computing / (1 - need.bubble)
        for scheme, found in (("PTD-P", model.ptd), ("ZeRO-3", model.zero3)):
            for gpus, (rows, published) in found.items():
                need = (pipelined if scheme == "PTD-P" else sharded)(model, gpus, rows)
                reached = need.operations / planned(need, speed, GPT_BANDWIDTH) / 1e12
                if need.strategy != "mesh" or gpus != fewest:
                    yield Figure(f"{scheme}, {name}, {gpus:,} GPUs", published / most, reached / most)


def pipelined(model: Gpt, gpus: int, rows: int) -> Need:
    """Returns what a GPU needs under PTD-P."""
    of_copy = model.tensor * model.pipeline
    copies = gpus // of_copy
    options = MeshOptions(pipeline=model.pipeline, tensor=model.tensor, micro_batches=rows // copies)
    return Need(
        strategy="mesh",
        operations=int(operations(rows, GPT_LENGTH, model.layers, model.hidden) / gpus),
        sent=reduced(2 * model.parameters / of_copy, copies),
        bubble=options.bubble,
    )


def sharded(model: Gpt, gpus: int, rows: int) -> Need:
    """Returns what a GPU needs under ZeRO-3: parameters are gathered forward and backward, gradients scattered."""
    return Need(
        strategy="zero3",
        operations=int(operations(rows, GPT_LENGTH, model.layers, model.hidden) / gpus),
        sent=3 * reduced(2 * model.parameters, gpus) // 2,
    )


def operations(rows: int, length: int, layers: int, hidden: int) -> float:
    """Returns the operations of a step of a GPT, with a second forward pass: Narayanan et al. 2021, equation 3."""
    whole = 96 * rows * length * layers * hidden**2
    return whole * (1 + length / (6 * hidden) + VOCABULARY / (16 * layers * hidden))


def planned(need: Need, speed: float, bandwidth: float) -> float:
    """Returns the seconds of a step that a plan says."""
    made = Plan(needs=(need,), workers=1, rows=1, parameters=1, speed=speed, bandwidth=bandwidth)
    seconds = made.seconds(need)
    assert seconds is not None
    return seconds
