"""What `benchmarks.ring` predicts, beside what is measured here and what others have published, and for 1,024 ranks.

On this machine, two pinned Gloo ranks without Spark. A probe measures, with both ranks at work but sending nothing,
forward, backward and optimizer of a step and when each gradient appears; then latency and bandwidth of an all-reduce,
and which share of it keeps the processor busy. From these the model predicts the steps that the training loop then
takes, probe and steps in turn. Nothing is fitted to the steps.

For the published points of data parallel, models, batches and links are what the publications state; `PUBLISHED` names
sources, and what had to be assumed. Each is predicted with all the overlap there can be, and with none.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from benchmarks.common import arguments, machine, printed, report, workspace
from benchmarks.ranks import RankContext, Ranks, arrays_of
from benchmarks.ring import Gradient, Link, Work, buckets, efficiency, evenly, step
from benchmarks.scaling import CASES, ONE_BUCKET_MB, Case, Way, train
from sparktorch.data.columns import LABEL, input_name
from sparktorch.distributed.process_group import process_group

RANKS = 2
MB = 2**20
SMALL, LARGE = 4, 16 * MB
CAPS_MB = (1, 25, ONE_BUCKET_MB)
SIZES = (2, 8, 64, 512, 1024)
GBIT = 1e9 / 8
LATENCY = 10e-6  # No publication states the latency of a message between machines; this is assumed for all.

# Megabytes of float32 gradients, by torchvision's counts of parameters.
INCEPTION_V3, RESNET_50, RESNET_101, VGG_16 = (4e-6 * n for n in (27_161_264, 25_557_032, 44_549_160, 138_357_544))


@dataclass(frozen=True)
class Point:
    """A published weak-scaling efficiency, and what the model needs to predict it."""

    ranks: int
    published: float
    work: Work
    link: Link


def images(megabytes: float, *, batch: int, per_second: float, fused: float, backward: float | None = None) -> Work:
    """Returns a step on images: two thirds of it are the backward pass where that is not known."""
    seconds = batch / per_second
    backward = backward or seconds * 2 / 3
    return Work(seconds - backward, backward, 0.0, evenly(megabytes * 1e6, fused * 1e6, backward))


# Horovod, 128 servers with four P100 GPUs and 25 Gbit/s each; tensor fusion of 64 MB:
# https://arxiv.org/abs/1802.05799 and https://horovod.readthedocs.io/en/stable/benchmarks_include.html. Batches of 64;
# images a second of one P100 by https://www.tensorflow.org/performance/benchmarks, but of ResNet-101 by Horovod's page,
# where 16 GPUs do 1656.82. One ring through all GPUs, which leaves and enters each server once.
# Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 4: 32 servers with 50 Gbit/s against one; ResNet-50 with
# 32 images a GPU, a backward pass of 120 ms, a transfer for each of its 161 tensors. Images a second as above. Among
# the servers they use halving and doubling, which has fewer messages than a ring.
PUBLISHED = {
    "Horovod, Inception V3": Point(
        512, 0.90, images(INCEPTION_V3, batch=64, per_second=142, fused=64), Link(25 * GBIT, LATENCY)
    ),
    "Horovod, ResNet-101": Point(
        512, 0.90, images(RESNET_101, batch=64, per_second=1656.82 / 16, fused=64), Link(25 * GBIT, LATENCY)
    ),
    "Horovod, VGG-16": Point(512, 0.68, images(VGG_16, batch=64, per_second=154, fused=64), Link(25 * GBIT, LATENCY)),
    "Goyal et al., ResNet-50": Point(
        32,
        0.90,
        images(RESNET_50, batch=32, per_second=195, fused=RESNET_50 / 161, backward=0.120),
        Link(50 * GBIT, LATENCY),
    ),
}

# BERT-large on 1, 2, 4 and 8 K80 GPUs. Of batch, step and link nothing is stated: the time to send, relative to the
# step, is taken from two GPUs, without overlap, and four and eight are predicted.
BERT_MINUTES = {1: 399, 2: 214, 4: 118, 8: 61}


def bert() -> dict[str, Point]:
    """Returns the points of BERT-large, of a step of one second and one byte."""
    published = {n: BERT_MINUTES[1] / (n * minutes) for n, minutes in BERT_MINUTES.items()}
    work, link = Work(1.0, 0.0, 0.0, (Gradient(0.0, 1.0),)), Link(1 / (1 / published[2] - 1))
    return {f"BERT-large, {n} K80 GPUs": Point(n, published[n], work, link) for n in (4, 8)}


def probe_work(context: RankContext, case: Case, steps: int) -> list[tuple[float, float, float, list[Gradient]]]:
    """Takes steps alone; returns of each forward, backward and optimizer in seconds, and when gradients appeared."""
    arrays = arrays_of(context.world, case.batch, case.inputs)
    features, label = torch.tensor(arrays[input_name(0)]), torch.tensor(arrays[LABEL])
    module = case.recipe.build_module(0)
    optimizer = case.recipe.build_optimizer(module)
    appeared: dict[torch.Tensor, float] = {}
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: appeared.__setitem__(p, time.perf_counter()))
    timed = []
    for _ in range(steps):
        optimizer.zero_grad()
        marks = [time.perf_counter()]
        loss = torch.nn.functional.mse_loss(module(features).squeeze(-1), label)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        marks.append(time.perf_counter())
        gradients = [Gradient(at - marks[1], parameter.nbytes) for parameter, at in appeared.items()]
        timed.append((marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2], gradients))
    return timed[steps // 3 :]  # The first steps warm up.


def probe_link(context: RankContext, rounds: int) -> tuple[float, float, float]:
    """Returns the median seconds of a small and of a large all-reduce, and the share of the latter that was work."""
    with process_group(context.world, context.store(), timeout=timedelta(minutes=5)):
        small, _ = all_reduces(SMALL, 20 * rounds)
        large, busy = all_reduces(LARGE, rounds)
    return small, large, busy


def all_reduces(size: int, times: int) -> tuple[float, float]:
    """Returns the median seconds of an all-reduce of `size` bytes, and processor seconds a second meanwhile."""
    tensor = torch.zeros(size // 4)
    dist.all_reduce(tensor)
    worked, marks = time.process_time(), [time.perf_counter()]
    for _ in range(times):
        dist.all_reduce(tensor)
        marks.append(time.perf_counter())
    busy = (time.process_time() - worked) / (marks[-1] - marks[0])
    return statistics.median(after - before for before, after in pairwise(marks)), busy


class Machine:
    """What was measured on this machine, round by round."""

    def __init__(self, ranks: Ranks, steps: int) -> None:
        self._ranks, self._steps = ranks, steps
        self._work: dict[str, list[tuple[float, float, float, list[Gradient]]]] = {name: [] for name in CASES}
        self._link: list[tuple[float, float, float]] = []
        self.measured: dict[str, dict[float, list[float]]] = {name: {mb: [] for mb in CAPS_MB} for name in CASES}

    def round(self) -> None:
        """Probes, and takes the steps that are to be predicted."""
        self._link.extend(self._ranks(probe_link, self._steps))
        for name, case in CASES.items():
            for steps in self._ranks(probe_work, case, self._steps):
                self._work[name].extend(steps)
            for mb in CAPS_MB:
                turns = self._ranks(train, case, Way(RANKS, mb))
                self.measured[name][mb].append(statistics.fmean(step.whole for step, _ in turns))

    def link(self) -> Link:
        """Returns what connects the ranks."""
        small, large, busy = (statistics.median(values) for values in zip(*self._link, strict=True))
        latency = small / (2 * (RANKS - 1))
        bandwidth = 2 * (RANKS - 1) / RANKS * LARGE / (large - small)
        return Link(bandwidth, latency, min(1.0, busy))

    def work(self, name: str, cap_mb: float) -> Work:
        """Returns a step of one rank, with buckets of that size."""
        forward, backward, optimizer, gradients = zip(*self._work[name], strict=True)
        middle = sorted(range(len(backward)), key=lambda i: backward[i])[len(backward) // 2]
        return Work(
            statistics.median(forward),
            backward[middle],
            statistics.median(optimizer),
            buckets(gradients[middle], cap_mb * MB),
        )


def show_here(here: Machine) -> dict[str, float]:
    """Prints predicted and measured steps of this machine; returns predicted over measured, by name."""
    link, ratios = here.link(), {}
    print(f"\nhere: {link.bandwidth / 1e6:.0f} MB/s, {1e6 * link.latency:.0f} us a message, {link.busy:.2f} busy")
    print(f"{RANKS} ranks, ms a step{'':31}{'alone':>10}{'predicted':>11}{'measured':>10}{'error':>8}")
    for name in CASES:
        for mb in CAPS_MB:
            work, way = here.work(name, mb), f"{name}: {Way(RANKS, mb)}"
            predicted, measured = step(work, RANKS, link), statistics.median(here.measured[name][mb]) / 1000
            ratios[f"{way}: predicted / measured"] = predicted / measured
            times = f"{1000 * work.seconds:10.2f}{1000 * predicted:11.2f}{1000 * measured:10.2f}"
            print(f"{way:52}{times}{predicted / measured - 1:+8.0%}")
    return ratios


def show_published() -> dict[str, float]:
    """Prints the published points; returns the predicted over the published efficiency, by name."""
    head = ("published", "overlap", "error", "none", "error", "1,024: overlap", "none")
    print(f"\n{'published efficiency':26}" + "".join(f"{title:>{len(title) + 3}}" for title in head))
    ratios = {}
    for name, point in (PUBLISHED | bert()).items():
        line = f"{name:26}{point.published:12.2f}"
        for overlap, width in ((True, 10), (False, 7)):
            predicted = efficiency(point.work, point.ranks, point.link, overlap=overlap)
            line += f"{predicted:{width}.2f}{predicted / point.published - 1:+8.0%}"
            ratios[f"{name}: predicted {'with' if overlap else 'without'} overlap / published"] = (
                predicted / point.published
            )
        for overlap, width in ((True, 17), (False, 7)):
            line += f"{efficiency(point.work, SIZES[-1], point.link, overlap=overlap):{width}.2f}"
        print(line)
    return ratios


def show_further(here: Machine) -> dict[str, dict[str, list[float]]]:
    """Prints and returns what this machine's steps would come to on more machines like it, by network."""
    measured_link = here.link()
    networks = {"as here": measured_link}
    for gbit in (10, 100):  # A byte takes as many processor seconds as here.
        bandwidth = gbit * GBIT
        networks[f"{gbit} Gbit/s"] = Link(
            bandwidth, LATENCY, min(1.0, measured_link.busy * bandwidth / measured_link.bandwidth)
        )
    print(f"\n{'efficiency on ranks':42}" + "".join(f"{size:>8,}" for size in SIZES))
    efficiencies: dict[str, dict[str, list[float]]] = {}
    for name in CASES:
        for network, link in networks.items():
            row = [efficiency(here.work(name, CAPS_MB[0]), size, link) for size in SIZES]
            efficiencies.setdefault(name, {})[network] = [round(value, 4) for value in row]
            print(f"{name + ', ' + network:42}" + "".join(f"{value:8.2f}" for value in row))
    return efficiencies


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    rounds, steps = (2, 6) if options.quick else (5, 15)
    with workspace(), Ranks(RANKS, pinned=True) as ranks:
        Machine(ranks, steps).round()  # The first round warms up.
        here = Machine(ranks, steps)
        for _ in range(rounds):
            here.round()
    parts = {
        "here": printed(lambda: show_here(here)),
        "published": printed(show_published),
    }
    further, table = printed(lambda: show_further(here))
    tables = {name: text for name, (_, text) in parts.items()} | {"further": table}
    link = here.link()
    report(
        "simulate",
        samples={
            f"{name}: {Way(RANKS, mb)}, ms a step": values
            for name, ways in here.measured.items()
            for mb, values in ways.items()
        },
        ratios={name: value for ratios, _ in parts.values() for name, value in ratios.items()},
        goals={},
        facts={
            "bandwidth": round(link.bandwidth),
            "latency": round(link.latency, 8),
            "busy": round(link.busy, 3),
            "efficiency": {"ranks": SIZES, **further},
            "printed": tables,
            **machine("torch"),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()
