"""A step of data-parallel training as arithmetic: ring all-reduces of buckets while the backward pass goes on.

A ring all-reduce among N ranks sends each 2 (N - 1) messages, one after the other, of an N-th of the bytes (Patarasuk
and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations). Buckets are sent one after the
other, as soon as their gradients are there (Li et al. 2020, https://arxiv.org/abs/2006.15704, section 3.2.3).

Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Gradient", "Link", "Work", "all_reduce", "buckets", "efficiency", "evenly", "step"]


@dataclass(frozen=True)
class Link:
    """What connects the ranks.

    Attributes:
        bandwidth: Bytes a second that a rank sends, while it receives as many.
        latency: Of a message.
        busy: Share of a transfer for which it takes the processor that computes: 0 beside a GPU, 1 where one core
            does both.
    """

    bandwidth: float
    latency: float = 0.0
    busy: float = 0.0


@dataclass(frozen=True)
class Gradient:
    """A gradient, or a bucket of them: when it is there, counted from the start of the backward pass, and its size."""

    ready: float
    size: float


@dataclass(frozen=True)
class Work:
    """A step of one rank that sends nothing.

    Attributes:
        forward: Of the forward pass and the loss.
        backward: Of the backward pass.
        optimizer: Of the optimizer's step.
        buckets: In the order in which they are sent.
    """

    forward: float
    backward: float
    optimizer: float
    buckets: tuple[Gradient, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward + self.optimizer


def all_reduce(size: float, ranks: int, link: Link) -> float:
    """Returns the seconds of a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) * (link.latency + size / (ranks * link.bandwidth))


def buckets(gradients: Sequence[Gradient], cap: float) -> tuple[Gradient, ...]:
    """Puts gradients into buckets as `DistributedDataParallel` does: one is full once it holds `cap` bytes."""
    full_buckets: list[Gradient] = []
    ready = size = 0.0
    for gradient in sorted(gradients, key=lambda gradient: gradient.ready):
        ready, size = gradient.ready, size + gradient.size
        if size >= cap:
            full_buckets.append(Gradient(ready, size))
            size = 0.0
    return (*full_buckets, Gradient(ready, size)) if size else tuple(full_buckets)


def evenly(size: float, cap: float, backward: float) -> tuple[Gradient, ...]:
    """Returns the buckets of `size` bytes of gradients that appear evenly over a backward pass."""
    full, rest = divmod(size, cap)
    sizes = [cap] * int(full) + [rest] * (rest > 0)
    sent, appeared = 0.0, []
    for part in sizes:
        sent += part
        appeared.append(Gradient(backward * sent / size, part))
    return tuple(appeared)


def step(work: Work, ranks: int, link: Link, *, overlap: bool = True) -> float:
    """Returns the seconds of a step on that many ranks.

    Args:
        work: What one rank does.
        ranks: How many there are.
        link: What connects them.
        overlap: Whether buckets are sent during the backward pass; otherwise after it.
    """
    sending = [all_reduce(bucket.size, ranks, link) for bucket in work.buckets]
    if not overlap:
        return work.seconds + sum(sending)
    # The link is free from `free` on; sending holds up the backward pass for `delay`.
    free = delay = held = 0.0
    for bucket, seconds in zip(work.buckets, sending, strict=True):
        held = delay  # The last bucket holds up nothing: with it the backward pass is over.
        free = max(free, bucket.ready + delay) + seconds
        delay += link.busy * seconds
    return work.forward + max(free, work.backward + held) + work.optimizer


def efficiency(work: Work, ranks: int, link: Link, *, overlap: bool = True) -> float:
    """Returns the weak-scaling efficiency: a step of one rank over a step of that many."""
    return work.seconds / step(work, ranks, link, overlap=overlap)
