"""Ranks that compute on the same rows: they exchange inputs before a forward pass, and take their own rows after it."""

from __future__ import annotations

import functools
import operator
import random
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.devices import seed
from sparktorch.errors import ModuleError
from sparktorch.train.numerics.determinism import untouched_generators
from sparktorch.train.recipe.arguments import Arguments

__all__ = ["RowExchange", "check_parts_within"]

_PARAM = "strategyParams"
_PLAIN = (int, float, str, bool, type(None))


class RowExchange:
    """The exchange around a forward pass, in one rank.

    Before a pass, ranks exchange the tensors among its arguments, and set their generators to one seed; after it, each
    takes its own rows of the output. All else, from sampling to losses, is each rank's own.

    Attributes:
        flags: Bits that this rank tells the others in the next exchange; after it, those that any rank has set.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Takes the ranks that compute on the same rows, and this rank's device."""
        self._group, self._device = group, device
        self._counts: list[int] = []
        self._pass = ExitStack()  # ends with the pass
        self._own_only = False  # whether a layer has returned this rank's rows only, in this pass
        self.flags = 0

    def attach(self, module: nn.Module, own_rows: Iterable[nn.Module] = ()) -> None:
        """Lets a module, which returns a row for each row, compute on the rows of all ranks.

        Args:
            module: The module.
            own_rows: Layers, each of which returns a rank's part of the columns of all rows. They return all columns of
                the rank's own rows instead, and so must do what the module computes of them.
        """
        hooks: Any = torch.compiler.disable
        for layer in own_rows:
            layer.register_forward_hook(hooks(self.columns))
        module.register_forward_pre_hook(hooks(self.before), with_kwargs=True)
        module.register_forward_hook(hooks(self.after))
        module.register_forward_hook(hooks(self.restore), always_call=True)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns the arguments with the rows of all ranks.

        Raises:
            ModuleError: Ranks have other arguments, or such that cannot be exchanged; in all ranks.
        """
        given, self._own_only = Arguments.of(args, kwargs), False
        number = self._meet(given, type(module).__name__)
        # A step may pass on tensors of the host.
        every = [_AllRows.apply(own.to(self._device), self._group, self._counts) for own in given.tensors]  # type: ignore[no-untyped-call]
        self._pass.enter_context(untouched_generators(self._device))
        seed(number, self._device)
        random.seed(number)
        np.random.seed(number)
        return given.filled(every)

    def columns(self, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Returns all columns of this rank's rows of a layer's output, of which each rank has some of all rows.

        No rank ever has all columns of all rows: (rows of this rank, ..., columns) are as many numbers as it had.

        Raises:
            ModuleError: The first axis is not that of the rows, or a rank has no rows.
        """
        total = sum(self._counts)
        if output.shape[:1] != (total,) or output.dim() < 2 or not all(self._counts):
            raise ModuleError(
                f"a 'colwise_own_rows' layer returns a tensor of shape {tuple(output.shape)} for {total} rows, of which"
                f" ranks that share layers have {', '.join(map(str, self._counts))}, and each takes its own",
                hint="divide it by 'colwise_gather_output' if its first axis is not that of the rows, and give each "
                "rank at least one",
                param=_PARAM,
            )
        self._own_only = True
        found: torch.Tensor = _Columns.apply(output, self._group, self._counts)  # type: ignore[no-untyped-call]
        return found

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns this rank's rows of the output.

        Raises:
            ModuleError: The output has not a row for each row.
        """
        found, spec = pytree.tree_flatten(output)
        total, own = sum(self._counts), self._counts[self._group.rank()]
        rows = (total, own) if self._own_only else (total,)
        for leaf in found:
            of_rows = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) in rows
            if not of_rows and (isinstance(leaf, torch.Tensor) or is_dataclass(leaf)):
                raise ModuleError(
                    f"{type(module).__name__} returned a value of type {type(leaf).__name__}"
                    f"{f' and shape {tuple(leaf.shape)}' if isinstance(leaf, torch.Tensor) else ''} for "
                    f"{' or '.join(map(str, rows))} rows, and ranks that share layers each take their own rows of it",
                    hint="return tensors with a row for each row, in tuples, lists or dicts, and compute the loss in "
                    "loss or trainingStep",
                    param=_PARAM,
                )
        places = [i for i, leaf in enumerate(found) if isinstance(leaf, torch.Tensor) and len(leaf) == total]
        if places:
            taken = _OwnRows.apply(self._group, self._counts, *(found[i] for i in places))  # type: ignore[no-untyped-call]
            for i, part in zip(places, taken, strict=True):
                found[i] = part
        return pytree.tree_unflatten(found, spec)

    def own(self, output: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of an output of all rows."""
        return _own(output, self._group.rank(), self._counts)

    def restore(self, *_: Any) -> None:
        """Ends a pass: gives the rank its own generators back, also after an exception."""
        self._pass.close()

    def _meet(self, given: Arguments, name: str) -> int:
        """Tells the ranks of this rank's arguments and flags; returns the first rank's seed, without a device."""
        dense = all(tensor.layout is torch.strided and not tensor.is_nested for tensor in given.tensors)
        fits = dense and len({len(tensor) for tensor in given.tensors}) == 1
        rows, signature = (given.rows, _signature(given)) if fits else (0, -1)
        own = torch.tensor([rows, signature, int(torch.randint(2**31, ())), self.flags])
        met = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(met, own, group=self._group)
        self._counts, signatures, seeds, flags = torch.stack(met).T.tolist()
        if -1 in signatures:
            raise ModuleError(
                f"{name} is called with tensors that are sparse or nested, or have not all as many rows, and ranks that"
                " share layers exchange rows",
                hint="pass tensors with a row for each row to forward, and set inputLayouts to 'dense' or 'padded'; or "
                "leave strategyParams.tensor out",
                param=_PARAM,
            )
        if len(set(signatures)) > 1:
            raise ModuleError(
                "ranks that share layers call the module with tensors of other shapes or dtypes, or with other numbers",
                hint="pad inputs to a fixed length, in preprocess, and draw numbers that rows share from one seed",
                param=_PARAM,
            )
        self.flags = functools.reduce(operator.or_, flags)
        return int(seeds[0])


def _signature(given: Arguments) -> int:
    """Returns a number for all that calls of several ranks must have in common."""
    common = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in given.tensors]
    others = [value for i, value in enumerate(given.values) if i not in given.places]
    numbers = [value.item() if isinstance(value, torch.Tensor) else value for value in others]
    plain = [value if isinstance(value, _PLAIN) else type(value).__name__ for value in numbers]
    return zlib.crc32(repr((common, plain)).encode())


class _AllRows(torch.autograd.Function):
    """Returns the rows of all ranks; backward, each rank keeps the gradients of its own, which all have computed."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup, counts: list[int]) -> torch.Tensor:
        ctx.rank, ctx.counts = group.rank(), counts
        return _gathered(own, group, counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own(gradient, ctx.rank, ctx.counts), None, None


class _OwnRows(torch.autograd.Function):
    """Takes a rank's rows of all outputs; backward, each rank gets the gradients of all rows, from whom they belong to.

    One function for all outputs, so that ranks whose losses use other outputs still meet in the same order.
    """

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, counts: list[int], *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.counts = group, counts
        own = tuple(_own(output, group.rank(), counts).clone() for output in outputs)
        ctx.mark_non_differentiable(*(part for part in own if not part.is_floating_point() and not part.is_complex()))
        return own

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        needed = zip(gradients, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(_gathered(each, ctx.group, ctx.counts) if needs else None for each, needs in needed)


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
    return tensor.narrow(0, sum(counts[:rank]), counts[rank])


def _gathered(own: torch.Tensor, group: dist.ProcessGroup, counts: list[int]) -> torch.Tensor:
    """Returns the rows of all ranks of a group, in the order of the ranks."""
    copies = own.detach().expand(group.size(), *own.shape).flatten(0, 1)
    return _exchanged(copies, group, [len(own)] * group.size(), counts)


def _exchanged(tensor: torch.Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> torch.Tensor:
    """Sends rows of a tensor to each rank of a group, in the order of the ranks; returns those that they have sent.

    Args:
        tensor: The rows that are sent.
        group: The group.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
    """
    found = tensor.new_empty(sum(received), *tensor.shape[1:])
    width = tensor.shape[1:].numel()
    given = tensor.detach().contiguous()
    into, out = (each.view(len(each), width).view(torch.uint8) for each in (found, given))  # of any dtype
    dist.all_to_all_single(into, out, received, sent, group=group)
    return found


def check_parts_within(step: Callable[[nn.Module, Any], Any], module: nn.Module, batch: Any) -> None:
    """Refuses, in the dry run, a training step that computes parts of the module outside of its forward pass.

    A step that fails anyway is left to the dry run, which says why.

    Raises:
        ModuleError: It does: these parts would get this rank's rows only.
    """
    depth, outside = [0], list[str]()

    def enter(by: int, *_: Any) -> None:
        depth[0] += by

    def seen(name: str, *_: Any) -> None:
        outside.extend([] if depth[0] else [name])

    hooks = [module.register_forward_pre_hook(partial(enter, 1))]
    hooks += [module.register_forward_hook(partial(enter, -1), always_call=True)]
    hooks += [part.register_forward_pre_hook(partial(seen, name)) for name, part in module.named_modules() if name]
    try:
        with torch.random.fork_rng(devices=()), suppress(Exception):
            step(module, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if outside:
        raise ModuleError(
            f"the training step computes {outside[0]!r} outside of a call of the module, before which ranks that share "
            "layers exchange their rows",
            hint="call the module in trainingStep, with an argument that says what it returns if there are several "
            "things, or use strategyParams.shard instead of tensor",
            param="trainingStep",
        )
