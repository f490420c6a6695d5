"""Ranks that compute on the same rows: they exchange inputs before a forward pass, and take their own rows after it."""

from __future__ import annotations

import functools
import operator
import random
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, is_dataclass
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
from sparktorch.train.sharding.arguments import Arguments

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
        self._rows = _Rows(group, [])
        self._pass = ExitStack()  # ends with the pass
        self._own_only = False  # whether a layer has returned this rank's rows only, in this pass
        self.flags = 0

    def attach(self, module: nn.Module, own_rows: Iterable[nn.Module] = ()) -> None:
        """Lets a module, which returns a row for each row, compute on the rows of all ranks.

        Layers of `own_rows`, each of which returns a rank's part of the columns of all rows, return all columns of the
        rank's own rows instead, and so must do what the module computes of them.
        """
        hooks: Any = torch.compiler.disable
        for layer in own_rows:
            layer.register_forward_hook(hooks(self.columns))
        module.register_forward_pre_hook(hooks(self.before), with_kwargs=True)
        module.register_forward_hook(hooks(self.after))
        module.register_forward_hook(hooks(self.restore), always_call=True)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns the arguments with the rows of all ranks; all refuse such as some have not, or that have no rows."""
        given, self._own_only = Arguments.of(args, kwargs), False
        number = self._meet(given, type(module).__name__)
        sent = [tensor.to(self._device) for tensor in given.tensors]  # a step may pass on tensors of the host
        every = [_exchanged(self._rows.every, self._rows.own, tensor)[0] for tensor in sent]
        self._pass.enter_context(untouched_generators(self._device))
        seed(number, self._device)
        random.seed(number)
        np.random.seed(number)
        return given.filled(every)

    def columns(self, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Returns all columns of this rank's rows of a layer's output, of which each rank has some of all rows.

        No rank ever has all columns of all rows: (rows of this rank, ..., columns) are as many numbers as it had.
        """
        counts = self._rows.counts
        if output.shape[:1] != (sum(counts),) or output.dim() < 2 or not all(counts):
            raise _not_by_rows(
                f"a 'colwise_own_rows' layer returns {_shown(output)} for {' + '.join(map(str, counts))} rows",
                "divide it by 'colwise_gather_output' if its first axis is not that of the rows, and give each rank at "
                "least one",
            )
        self._own_only = True
        found: torch.Tensor = _exchanged(self._rows.columns, self._rows.parts, output)[0]
        return found

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns this rank's rows of the output, which has a row for each row."""
        found, spec = pytree.tree_flatten(output)
        total = sum(self._rows.counts)
        rows = (total, self._rows.counts[self._group.rank()]) if self._own_only else (total,)
        for leaf in found:
            tensor = isinstance(leaf, torch.Tensor)
            if is_dataclass(leaf) or (tensor and (leaf.dim() == 0 or len(leaf) not in rows)):
                raise _not_by_rows(
                    f"{type(module).__name__} returned {_shown(leaf)} for {' or '.join(map(str, rows))} rows",
                    "return tensors with a row for each row, in tuples, lists or dicts, and compute the loss in "
                    "loss or trainingStep",
                )
        # In one call for all outputs, so that ranks whose losses use other outputs still meet in the same order.
        places = [i for i, leaf in enumerate(found) if isinstance(leaf, torch.Tensor) and len(leaf) == total]
        taken = _exchanged(self._rows.copied, self._rows.every, *(found[i] for i in places)) if places else ()
        for i, part in zip(places, taken, strict=True):
            found[i] = part
        return pytree.tree_unflatten(found, spec)

    def split(self, output: torch.Tensor) -> list[torch.Tensor]:
        """Returns copies of the rows of each rank of an output of all rows; of another output, all of it for each."""
        counts = self._rows.counts
        by_rows = output.dim() > 0 and len(output) == sum(counts)
        return [part.clone() for part in torch.split(output, counts)] if by_rows else [output] * len(counts)

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
        counts, signatures, seeds, flags = torch.stack(met).T.tolist()
        for refused, what, hint in (
            (
                -1 in signatures,
                f"{name} is called with tensors that are sparse or nested, or have not all as many rows, and ranks that"
                " share layers exchange rows",
                "pass tensors with a row for each row to forward, and set inputLayouts to 'dense' or 'padded'; or "
                "leave strategyParams.tensor out",
            ),
            (
                len(set(signatures)) > 1,
                "ranks that share layers call the module with tensors of other shapes or dtypes, or with other numbers",
                "pad inputs to a fixed length, in preprocess, and draw numbers that rows share from one seed",
            ),
        ):
            if refused:
                raise ModuleError(what, hint=hint, param=_PARAM)
        self._rows, self.flags = _Rows(self._group, counts), functools.reduce(operator.or_, flags)
        return int(seeds[0])


def _signature(given: Arguments) -> int:
    """Returns a number for all that calls of several ranks must have in common."""
    common = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in given.tensors]
    others = [value for i, value in enumerate(given.values) if i not in given.places]
    numbers = [value.item() if isinstance(value, torch.Tensor) else value for value in others]
    plain = [value if isinstance(value, _PLAIN) else type(value).__name__ for value in numbers]
    return zlib.crc32(repr((common, plain)).encode())


def _not_by_rows(what: str, hint: str) -> ModuleError:
    what = f"{what}, and ranks that share layers each take their own rows of it"
    return ModuleError(what, hint=hint, param=_PARAM, code="ST-TENSOR-PARALLEL")


def _shown(leaf: Any) -> str:
    shape = f" of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else ""
    return f"a value of type {type(leaf).__name__}{shape}"


@dataclass(frozen=True)
class _Rows:
    """How many rows each rank of a group has in a pass."""

    group: dist.ProcessGroup
    counts: list[int]

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's of all rows."""
        rank = self.group.rank()
        return tensor.narrow(0, sum(self.counts[:rank]), self.counts[rank])

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of this rank's rows."""
        return self.own(tensor).clone()

    def every(self, own: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, in the order of the ranks."""
        copies = own.detach().expand(self.group.size(), *own.shape).flatten(0, 1)
        return self._sent(copies, [len(own)] * self.group.size(), self.counts)

    def columns(self, part: torch.Tensor) -> torch.Tensor:
        """Returns all columns of this rank's rows, given some of all rows."""
        size, count = self.group.size(), self.counts[self.group.rank()]
        found = self._sent(part, self.counts, [count] * size)
        return found.view(size, count, *part.shape[1:]).movedim(0, -2).flatten(-2)

    def parts(self, own: torch.Tensor) -> torch.Tensor:
        """Returns this rank's columns of all rows, given all columns of its own rows."""
        size = self.group.size()
        parts = own.reshape(*own.shape[:-1], size, -1).movedim(-2, 0).flatten(0, 1)
        return self._sent(parts, [len(own)] * size, self.counts)

    def _sent(self, tensor: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Sends numbers of a tensor's rows to the ranks, in their order; returns those that they have sent."""
        found = tensor.new_empty(sum(received), *tensor.shape[1:])
        width = tensor.shape[1:].numel()
        given = tensor.detach().contiguous()
        into, out = (each.view(len(each), width).view(torch.uint8) for each in (found, given))  # of any dtype
        dist.all_to_all_single(into, out, received, sent, group=self.group)
        return found


def _exchanged(forward: Callable[..., Any], backward: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Returns what a function makes of each tensor; backward, another one is called for each gradient."""
    return _Exchange.apply(forward, backward, *tensors)  # type: ignore[no-untyped-call]  # torch's


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.of_gradient = backward
        found = tuple(forward(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(*(each for each in found if not each.is_floating_point() and not each.is_complex()))
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        needed = zip(gradients, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(ctx.of_gradient(each) if needs else None for each, needs in needed)


def check_parts_within(step: Callable[[nn.Module, Any], Any], module: nn.Module, batch: Any) -> None:
    """Refuses, in the dry run, a training step that computes parts of the module outside of its forward pass.

    These would get this rank's rows only. A step that fails anyway is left to the dry run, which says why.
    """
    within, outside = list[nn.Module](), list[str]()

    def called(name: str, part: nn.Module, args: Any) -> None:
        if part is module:
            within.append(part)
        elif not within:
            outside.append(name)

    hooks = [part.register_forward_pre_hook(partial(called, name)) for name, part in module.named_modules()]
    hooks.append(module.register_forward_hook(lambda *_: within.clear(), always_call=True))
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
