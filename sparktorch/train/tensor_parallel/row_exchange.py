"""Ranks that compute on the same rows: they exchange inputs before a forward pass, and take their own rows after it."""

from __future__ import annotations

import functools
import itertools
import operator
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.devices import is_host, module_of, seed
from sparktorch.errors import ModuleError, SparkTorchError
from sparktorch.train.dtensor import local

__all__ = ["PARAM", "RowExchange", "share_rows"]

PARAM = "strategyParams"
_FAILED = -1
_WIDEST = 16  # bytes of a number
_PLAIN = (int, float, str, bool, type(None))
_TOLERANCE = 1e-2  # of what should be equal in all ranks: wrong plans make differences of its own size


def share_rows(
    module: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    own_rows: Mapping[str, nn.Module] | None = None,
    divided: Mapping[str, nn.Module] | None = None,
) -> RowExchange:
    """Lets a module compute on the rows of all ranks of a group in each of them; returns what exchanges them.

    Before a forward pass, the ranks exchange the tensors among its arguments, and set their generators to one seed;
    after it, each takes its own rows of the output. All else, from sampling to losses, is each rank's own.

    Args:
        module: The module; it must return a row for each of its rows.
        group: This rank's group.
        device: This rank's device.
        own_rows: Layers by name, each of which returns a rank's part of the columns of all rows. They return all
            columns of the rank's own rows instead, and so must do what the module computes of them.
        divided: Other layers by name, which add up or gather what all ranks compute, and so need all rows.
    """
    exchange = RowExchange(group, device, own_rows=bool(own_rows))
    hooks: Any = torch.compiler.disable
    for name, layer in (divided or {}).items() if own_rows else ():
        layer.register_forward_pre_hook(partial(exchange.refuse_own_rows, name))
    for name, layer in (own_rows or {}).items():
        layer.register_forward_hook(hooks(partial(exchange.columns, name)))
    module.register_forward_pre_hook(hooks(exchange.before), with_kwargs=True)
    module.register_forward_hook(hooks(exchange.after))
    module.register_forward_hook(hooks(exchange.restore), always_call=True)
    return exchange


class RowExchange:
    """The hooks around a forward pass, in one rank.

    Attributes:
        flags: Bits that this rank tells the others in the next exchange; after it, those that any rank has set.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, own_rows: bool = False) -> None:
        self._group, self._device, self._of_own_rows = group, device, own_rows
        self.flags = 0
        self._counts: list[int] = []
        self._generators: Any = None
        self._compared: set[tuple[str, bool]] = set()  # the module or a layer, in training or in evaluation
        self._own_only = ""  # the last layer that has returned this rank's rows only, in this pass

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns the arguments with the rows of all ranks.

        Raises:
            ModuleError: Arguments cannot be exchanged; in all ranks if they are those of one.
        """
        found, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(found) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        try:
            if self._of_own_rows:
                _refuse_labels(module, kwargs)
            rows, signature = _described(module, found, places)
        except SparkTorchError:
            self._meet(_FAILED, 0)
            raise
        number = self._meet(rows, signature)
        own = [found[i].to(self._device) for i in places]  # a step may pass on tensors of the host
        for i, here, gathered in zip(places, own, _gathered(own, self._group, self._counts), strict=True):
            found[i] = _AllRows.apply(here, [gathered], self._group.rank(), self._counts)  # type: ignore[no-untyped-call]
        self._agree(number)
        return pytree.tree_unflatten(found, spec)

    def columns(self, name: str, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Returns all columns of this rank's rows of a layer's output, of which each rank has some of all rows.

        No rank ever has all columns of all rows: (rows of this rank, ..., columns) are as many numbers as it had.

        Raises:
            ModuleError: The first axis is not that of the rows; a rank has no rows; or the inputs differ between ranks.
        """
        total = sum(self._counts)
        if output.shape[:1] != (total,) or output.dim() < 2 or not all(self._counts):
            raise ModuleError(
                f"{name!r} returns a tensor of shape {tuple(output.shape)} for {total} rows, of which ranks that share "
                f"layers have {', '.join(map(str, self._counts))}, and each takes its own",
                hint="divide it by 'colwise_gather_output' if its first axis is not that of the rows, and give each "
                "rank at least one",
                param=PARAM,
            )
        self._compare_once(name, layer, [local(args[0])])
        if self._generators is not None:  # else a pass is computed again, for its gradients
            self._own_only = name
        found: torch.Tensor = _Columns.apply(output, self._group, self._counts)  # type: ignore[no-untyped-call]
        return found

    def refuse_own_rows(self, name: str, layer: nn.Module, args: Any) -> None:
        """Refuses to compute a divided layer behind one that has returned this rank's rows only.

        Raises:
            ModuleError: One has, in this pass.
        """
        if self._own_only:
            raise ModuleError(
                f"{name!r} is divided, and computed behind {self._own_only!r}, which leaves each rank its own rows: "
                "ranks that share a layer need the same rows",
                hint=f"divide {self._own_only!r} by 'colwise_gather_output', leave {name!r} whole or compute it before",
                param=PARAM,
            )

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns this rank's rows of the output.

        Raises:
            ModuleError: The output has not a row for each row, or differs between the ranks.
        """
        found, spec = pytree.tree_flatten(output)
        places = [i for i, leaf in enumerate(found) if isinstance(leaf, torch.Tensor)]
        total, own = sum(self._counts), self._counts[self._group.rank()]
        rows = (total, own) if self._own_only else (total,)
        for leaf in found:
            shown = f"shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"type {type(leaf).__name__}"
            if not (leaf.dim() and len(leaf) in rows if isinstance(leaf, torch.Tensor) else not is_dataclass(leaf)):
                raise ModuleError(
                    f"{type(module).__name__} returned a value of {shown} for {' or '.join(map(str, rows))} rows, and "
                    "ranks that share layers each take their own rows of it",
                    hint="return tensors with a row for each row, in tuples, lists or dicts, and compute the loss in "
                    "loss or trainingStep",
                    param=PARAM,
                )
        self._compare_once("", module, [found[i] for i in places if len(found[i]) == total])
        if any(len(found[i]) == total for i in places):
            taken = _OwnRows.apply(self._group, self._counts, *(found[i] for i in places))  # type: ignore[no-untyped-call]
            for i, part in zip(places, taken, strict=True):
                found[i] = part
        return pytree.tree_unflatten(found, spec)

    def _meet(self, rows: int, signature: int) -> int:
        """Tells the ranks of this rank's arguments and flags; returns the first rank's seed. No device is waited for.

        Raises:
            ModuleError: Another rank has failed, or has other arguments.
        """
        own = torch.tensor([rows, signature, int(torch.randint(2**31, ())), self.flags])
        met = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(met, own, group=self._group)
        counts, signatures, seeds, flags = torch.stack(met).T.tolist()
        if rows != _FAILED and (_FAILED in counts or len(set(signatures)) > 1):
            raise ModuleError(
                "ranks that share layers call the module with tensors of other shapes or dtypes, or with other numbers",
                hint="pad inputs to a fixed length, in preprocess, and draw numbers that rows share from one seed",
                param=PARAM,
            )
        self._counts, self.flags = counts, functools.reduce(operator.or_, flags)
        return int(seeds[0])

    def _compare_once(self, name: str, part: nn.Module, values: list[torch.Tensor]) -> None:
        """Checks that all ranks have computed the same, in the first pass of each mode.

        Args:
            name: Name of a layer, whose inputs are compared; empty for the module, of which it is the outputs.
            part: The layer or the module.
            values: What is compared.

        Raises:
            ModuleError: They have not.
        """
        if (name, part.training) in self._compared:
            return
        self._compared.add((name, part.training))
        what = f"the input of {name!r}" if name else f"the output of {type(part).__name__}"
        for leaf in values:
            if not leaf.is_floating_point() or not leaf.numel():
                continue
            highest, lowest = leaf.detach().float().clone(), leaf.detach().float().clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._group)
            dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self._group)
            largest = highest.abs().max().maximum(lowest.abs().max())
            if (highest - lowest).max() > _TOLERANCE * largest:
                raise ModuleError(
                    f"{what} differs between ranks that share layers: a divided output, or one of some rows, reaches a "
                    "part that needs all of it",
                    hint="let a 'rowwise' layer follow each 'colwise' one, with elementwise functions between them, or "
                    "use 'colwise_gather_output'",
                    param=PARAM,
                )

    def _agree(self, number: int) -> None:
        of_device = None if is_host(self._device) else module_of(self._device).get_rng_state(self._device)
        self._generators = (torch.get_rng_state(), of_device, random.getstate(), np.random.get_state())
        seed(number, self._device)
        random.seed(number)
        np.random.seed(number)

    def restore(self, *_: Any) -> None:
        """Ends a pass: gives the rank its own generators back, also after an exception."""
        self._own_only = ""
        if self._generators is None:
            return
        of_host, of_device, of_python, of_numpy = self._generators
        self._generators = None
        torch.set_rng_state(of_host)
        if of_device is not None:
            module_of(self._device).set_rng_state(of_device, self._device)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _refuse_labels(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuses the labels with which a transformers model computes a loss, where it has scores of own rows only.

    Raises:
        ModuleError: There are some.
    """
    if hasattr(module, "_tp_plan") and arguments.get("labels") is not None:
        raise ModuleError(
            f"{type(module).__name__} is called with labels, of which it would compute one loss for all rows, and ranks"
            " that share layers each have the scores of their own rows",
            hint="call it without labels, and compute the loss of its logits in loss or trainingStep",
            param=PARAM,
        )


def _described(module: nn.Module, leaves: list[Any], places: list[int]) -> tuple[int, int]:
    """Returns the number of rows of a call's tensors, and a number for all that ranks must have in common.

    Raises:
        ModuleError: The tensors cannot be exchanged.
    """
    tensors = [leaves[i] for i in places]
    odd = next((tensor.layout for tensor in tensors if tensor.layout is not torch.strided or tensor.is_nested), None)
    if odd is not None:
        raise ModuleError(
            f"{type(module).__name__} gets a tensor of layout {odd}, which ranks that share layers cannot exchange",
            hint="set inputLayouts to 'dense' or 'padded' for the column, or leave strategyParams.tensor out",
            param=PARAM,
        )
    if len({len(tensor) for tensor in tensors}) != 1:
        raise ModuleError(
            f"{type(module).__name__} is called with {len(tensors)} tensors that have not all as many rows, and ranks "
            "that share layers exchange rows",
            hint="pass tensors with a row for each row to forward, or leave strategyParams.tensor out",
            param=PARAM,
        )
    numbers = [
        leaf.item() if isinstance(leaf, torch.Tensor) else leaf for i, leaf in enumerate(leaves) if i not in places
    ]
    common = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]
    others = [value if isinstance(value, _PLAIN) else type(value).__name__ for value in numbers]
    return len(tensors[0]), zlib.crc32(repr((common, others)).encode())


class _AllRows(torch.autograd.Function):
    """Returns the rows of all ranks; backward, each rank keeps the gradients of its own, which all have computed."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, gathered: list[torch.Tensor], rank: int, counts: list[int]
    ) -> torch.Tensor:
        ctx.rank, ctx.counts = rank, counts
        return gathered[0].detach()  # an argument that is returned becomes a view, which no module may change

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _own(gradient, ctx.rank, ctx.counts), None, None, None


class _OwnRows(torch.autograd.Function):
    """Takes a rank's rows of all outputs; backward, each rank gets the gradients of all rows, from whom they belong to.

    One function for all outputs, so that ranks whose losses use other outputs still meet once. Outputs that have a
    rank's own rows only are left as they are.
    """

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, counts: list[int], *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.counts, total = group, counts, sum(counts)
        ctx.all_rows = [len(output) == total for output in outputs]
        own = tuple(
            (_own(output, group.rank(), counts) if len(output) == total else output).clone() for output in outputs
        )
        ctx.mark_non_differentiable(*(part for part in own if not part.is_floating_point() and not part.is_complex()))
        return own

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        found = [
            gradient if needs else None for gradient, needs in zip(gradients, ctx.needs_input_grad[2:], strict=True)
        ]
        places = [i for i, all_rows in enumerate(ctx.all_rows) if all_rows and found[i] is not None]
        for i, gradient in zip(places, _gathered([gradients[i] for i in places], ctx.group, ctx.counts), strict=True):
            found[i] = gradient
        return (None, None, *found)


class _Columns(torch.autograd.Function):
    """Returns all columns of a rank's rows, of which each rank has some of all rows; backward, the reverse."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, counts: list[int]) -> torch.Tensor:
        ctx.group, ctx.counts = group, counts
        own = [counts[group.rank()]] * group.size()
        found = _exchanged(tensor, group, counts, own)
        return found.view(group.size(), own[0], *tensor.shape[1:]).movedim(0, -2).flatten(-2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        size = ctx.group.size()
        parts = gradient.reshape(*gradient.shape[:-1], size, -1).movedim(-2, 0).flatten(0, 1)
        return _exchanged(parts, ctx.group, [len(gradient)] * size, ctx.counts), None, None


def _own(tensor: torch.Tensor, rank: int, counts: list[int]) -> torch.Tensor:
    start = sum(counts[:rank])
    return tensor[start : start + counts[rank]]


def _gathered(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, counts: list[int]) -> list[torch.Tensor]:
    """Returns the rows of the ranks of a group of each tensor, in the order of the ranks: sent together, as bytes."""
    if not tensors:
        return []
    most, size = max(counts), group.size()
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]  # of any dtype
    # Each begins where numbers of its dtype may, and takes as much room as most rows do.
    ends = list(itertools.accumulate(_room(tensor, most) for tensor in tensors))
    sent = flat[0].new_empty(ends[-1])
    for own, end, tensor in zip(flat, ends, tensors, strict=True):
        start = end - _room(tensor, most)
        sent[start : start + own.numel()] = own
    met = sent.new_empty(size, len(sent))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its new name, its old one
    gather(met.view(-1), sent, group=group)
    found = []
    for end, tensor in zip(ends, tensors, strict=True):
        start = end - _room(tensor, most)
        width = tensor.shape[1:].numel() * tensor.element_size()
        if min(counts) == most:
            rows = met[:, start : start + most * width].flatten()  # a view, if it is the only tensor
        else:
            rows = torch.cat([met[rank, start : start + count * width] for rank, count in enumerate(counts)])
        found.append(rows.view(tensor.dtype).view(sum(counts), *tensor.shape[1:]))
    return found


def _room(tensor: torch.Tensor, rows: int) -> int:
    """Returns the bytes of so many rows of a tensor, up to a multiple of the widest dtype's."""
    return -(-rows * tensor.shape[1:].numel() * tensor.element_size() // _WIDEST) * _WIDEST


def _exchanged(tensor: torch.Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> torch.Tensor:
    """Sends rows of a tensor to each rank of a group, in the order of the ranks; returns those that they have sent.

    Args:
        tensor: The rows that are sent.
        group: The group.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
    """
    flat = tensor.detach().contiguous().view(len(tensor), -1).view(torch.uint8)  # backends do not take every dtype
    found = flat.new_empty(sum(received), flat.shape[1])
    dist.all_to_all_single(found, flat, received, sent, group=group)
    return found.view(tensor.dtype).view(-1, *tensor.shape[1:])
