"""Checks that ranks which shard parameters call the same units; equal sizes of others would mix gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.errors import ModuleError
from sparktorch.train.sharding.same_parameters import HINT

__all__ = ["SameCalls"]

_END, _BACKWARD = -1, -2  # of a forward pass, in place of the number of a unit


class SameCalls:
    """Every forward pass in training calls the units that one of the first step has called, in the same order.

    Each call gathers parameters, so ranks that call others would wait for each other, or mix units of one size. In the
    first step, ranks compare each call before it gathers. From then on, each compares with what it knows or, where the
    passes are of several kinds, with the others again.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Takes the groups of ranks that share units, each along one dimension of a mesh; without any, none compare."""
        self._groups, self._names = groups, list[str]()
        self._calls: tuple[int, ...] = ()  # of the forward pass that runs now
        self._depth = 0  # of calls of the whole module
        self._known: set[tuple[int, ...]] = set()  # how passes have begun
        self._compares = True

    def add(self, name: str, unit: nn.Module, *, root: bool) -> None:
        """Compares the calls of a unit in training from now on, before hooks that it has."""
        unit.register_forward_pre_hook(partial(self._call, len(self._names), root), prepend=True)
        self._names.append(name or type(unit).__name__)
        if root:
            unit.register_forward_hook(self._end)

    def end_step(self) -> None:
        """Ends a step; what later steps call must be known by then, unless it was of several kinds."""
        self._depth, self._compares = 0, sum(calls[-1] == _END for calls in self._known) > 1

    def _call(self, number: int, root: bool, unit: nn.Module, *_: Any) -> None:
        if root and torch.is_grad_enabled() and unit.training:
            self._calls = self._calls if self._depth else ()
            self._depth += 1
        if self._depth:  # not in backward, where activations may be computed again
            self._note(number)

    def _end(self, _: Any, __: Any, output: Any) -> None:
        if not self._depth:
            return
        self._depth -= 1
        if self._depth:
            return
        self._note(_END)
        outputs = [each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad]
        if self._compares and outputs:  # or another rank calls the module once more
            torch.autograd.graph.register_multi_grad_hook(outputs, lambda _: self._compare(_BACKWARD), mode="any")

    def _note(self, number: int) -> None:
        self._calls = (*self._calls, number)
        if not self._compares and self._calls not in self._known:
            expected = [known[-1] for known in self._known if known[:-1] == self._calls[:-1]]
            raise self._refused(number, expected, "the first step")
        self._known.add(self._calls)
        if self._compares:
            self._compare(number)

    def _compare(self, number: int) -> None:
        """Compares a call with those of the other ranks."""
        for group in self._groups:
            ends = torch.tensor([number, -number])
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
            others = {int(ends[0]), -int(ends[1])} - {number}
            if others:
                raise self._refused(number, sorted(others), "another rank")

    def _refused(self, number: int, others: Sequence[int], whose: str) -> ModuleError:
        """Returns an error that names a unit which some have called and others not."""
        odd = max([number, *others])
        name = repr(self._names[odd]) if 0 <= odd < len(self._names) else "a part"
        return ModuleError(
            f"a forward pass {'does not call' if number < odd else 'calls'} {name} where {whose} does"
            f"{'' if number < odd else ' not'}, and strategies that shard parameters gather those of a part when it is "
            "called",
            hint=HINT,
            param="strategy",
            code="ST-SHARDING",
        )
