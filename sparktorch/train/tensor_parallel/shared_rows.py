"""Ranks that compute on the same rows, as those that share layers or have stages of one pipeline.

Each rank samples its own rows. Before a pass it gets those of the other ranks, too, and then all of them compute what
they return, and the loss of it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.base.devices import seed
from sparktorch.base.no_op import no_op
from sparktorch.errors import ModuleError
from sparktorch.train.numerics.determinism import untouched_generators

__all__ = ["compare_first_call", "shared_rows"]


@contextmanager
def shared_rows(
    batch: Batch, group: dist.ProcessGroup, device: torch.device, before: Callable[[], object] = no_op
) -> Iterator[Batch]:
    """Context of a pass on the rows of all ranks of a group, in which they draw the same numbers; a collective.

    It yields a batch of the rows in the order of the ranks. Where some ranks have rows and others only placeholders,
    the latter are left out. A `ModuleError` in all ranks refuses rows of other shapes, and sparse and jagged ones.
    `before` is called while each rank still draws numbers of its own.
    """
    every, number = _of_all(batch, group)
    before()
    with untouched_generators(device):
        seed(number, device)
        random.seed(number)
        np.random.seed(number)
        yield every


def _of_all(batch: Batch, group: dist.ProcessGroup) -> tuple[Batch, int]:
    """Returns the batch of all ranks, and a number that the first of them has drawn."""
    weighted = [int(weights is not None) for weights in (batch.weight, batch.loss_weight)]
    real = batch.slice(0, batch.rows)
    counts = [batch.rows, len(real.inputs[0]), batch.sample_count, len(batch.inputs[0])]
    facts = [*counts, *weighted, _form(batch), int(torch.randint(2**31, ()))]
    # One exchange of small numbers precedes those of rows, for their sizes and for refusals that all ranks raise.
    sent = torch.tensor([*facts, *(batch.inputs[position].shape[1] for position in batch.pads)])
    of_ranks = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(of_ranks, sent, group=group)
    columns = torch.stack(of_ranks).T.tolist()
    samples, rows, all_samples, all_rows, weights, loss_weights, forms, numbers, *lengths = columns
    if -1 in forms:
        raise ModuleError(
            "ranks that share layers or have stages of a pipeline exchange rows, and inputs are sparse or nested",
            hint="set inputLayouts to 'dense' or 'padded', or leave strategyParams.tensor and pipeline out",
            param="strategyParams",
        )
    if len(set(forms)) > 1:
        raise ModuleError(
            "ranks that compute on the same rows have tensors of other shapes or dtypes",
            hint="pad inputs to a fixed length, in preprocess",
            param="strategyParams",
        )
    part, total = real, sum(samples)
    if not total:  # Every rank has placeholders only.
        part, samples, rows = batch, all_samples, all_rows
    part = part.padded(dict(zip(batch.pads, map(max, lengths), strict=True)))
    ones = torch.ones(part.sample_count, device=part.inputs[0].device)
    if part.weight is None and any(weights):
        part = replace(part, weight=ones)
    if part.loss_weight is None and any(loss_weights):
        part = replace(part, loss_weight=ones)

    def of_rows(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else _exchanged(tensor, rows, group)

    # A sample is a row or, where there are `sizes`, a group of rows.
    def of_samples(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else _exchanged(tensor, samples, group)

    every = replace(
        part,
        inputs=tuple(map(of_rows, part.inputs)),
        label=of_rows(part.label),
        weight=of_samples(part.weight),
        loss_weight=of_samples(part.loss_weight),
        rows=total,
        lengths={position: of_rows(counts) for position, counts in part.lengths.items()},
        tokens=of_rows(part.tokens),
        sizes=of_samples(part.sizes),
    )
    return every, int(numbers[0])


def _form(batch: Batch) -> int:
    """Returns a number for all that the batches of several ranks must have in common; -1 of sparse and nested ones."""
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in batch.inputs):
        return -1
    padded = {*batch.pads, *(position + 1 for position in batch.pads)}  # The mask follows what is padded.
    shapes = [(t.shape[2 if index in padded else 1 :], t.dtype) for index, t in enumerate(batch.inputs)]
    label = None if batch.label is None else (batch.label.shape[1:], batch.label.dtype)
    others = (batch.tokens is None, batch.sizes is None, sorted(batch.lengths))
    return zlib.crc32(repr((shapes, label, others)).encode())


def _exchanged(tensor: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the rows of all ranks, given those of this rank; `counts` are the numbers of rows of each."""
    every = tensor.new_empty(sum(counts), *tensor.shape[1:])
    copies = tensor.detach().expand(group.size(), *tensor.shape).contiguous()
    received, sent = (rows.view(-1, tensor.shape[1:].numel()).view(torch.uint8) for rows in (every, copies))
    dist.all_to_all_single(received, sent, list(counts), [len(tensor)] * group.size(), group=group)
    return every


def compare_first_call(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Lets the ranks of a group compare what the module is called with, the first time, in loops of users.

    A `ModuleError` in all ranks says that they call it with other rows.
    """

    def compare(_: nn.Module, args: Any, kwargs: Any) -> None:
        hook.remove()
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        checksum = torch.tensor(0)
        for tensor in tensors:
            content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            checksum.fill_(zlib.crc32(content, int(checksum)))
        checksums = [torch.empty_like(checksum) for _ in range(group.size())]
        dist.all_gather(checksums, checksum, group=group)
        if len(set(map(int, checksums))) > 1:
            raise ModuleError(
                "ranks that share layers call the module with other rows",
                hint="take batches from context.loader and context.validation, which have the rows of all of them, or "
                "use strategyParams.shard instead of tensor",
                param="function",
            )

    hook = module.register_forward_pre_hook(torch.compiler.disable(compare), with_kwargs=True)  # type: ignore[no-untyped-call]
