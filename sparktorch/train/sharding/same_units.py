"""Checks that ranks which shard parameters call the same units, and have gradients of the same parameters.

Units and gradients of equal sizes would be mixed otherwise; others would crash or hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.devices import is_host
from sparktorch.errors import ModuleError

__all__ = ["SameCalls", "SameParameters"]

_END, _BACKWARD = -1, -2  # They stand for a forward pass where a unit has its number.
# Its name since torch 2.13, which warns of the other one.
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _extremes(number: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Returns the largest and the smallest of the ranks' numbers."""
    ends = torch.tensor([number, -number])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    return int(ends[0]), -int(ends[1])


def _refused(what: str) -> ModuleError:
    hint = "use strategy='ddp' or 'zero1'; or let every row use them, with a factor of 0 where they do not count"
    return ModuleError(what, hint=hint, param="strategy", code="ST-SHARDING")


class SameCalls:
    """Every forward pass in training calls the units that one of the first step has called, in the same order.

    Each call gathers parameters, so ranks that call others would wait for each other, or mix units of one size. In the
    first step, ranks compare each call before it gathers. From then on, each compares with what it knows or, where the
    passes are of several kinds, with the others again.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Takes the groups of ranks that share units, each along one dimension of a mesh; without any, none compare."""
        self._groups, self._names = groups, list[str]()
        self._calls: tuple[int, ...] = ()  # The forward pass that runs now has made these.
        self._depth = 0  # The whole module may call itself.
        self._beginnings: set[tuple[int, ...]] = set()  # Forward passes have begun so.
        self._compares = True

    def add(self, name: str, unit: nn.Module, *, root: bool) -> None:
        """Compares the calls of a unit in training from now on, before hooks that it has."""
        unit.register_forward_pre_hook(partial(self._call, len(self._names), root), prepend=True)
        self._names.append(name or type(unit).__name__)
        if root:
            unit.register_forward_hook(self._end)

    def end_step(self) -> None:
        """Ends a step; what later steps call must be known by then, unless it was of several kinds."""
        self._depth, self._compares = 0, sum(calls[-1] == _END for calls in self._beginnings) > 1

    def _call(self, number: int, root: bool, unit: nn.Module, *_: Any) -> None:
        if root and torch.is_grad_enabled() and unit.training:
            self._calls = self._calls if self._depth else ()
            self._depth += 1
        if self._depth:  # In backward, where activations may be computed again, it is 0.
            self._note(number)

    def _end(self, _: Any, __: Any, output: Any) -> None:
        if not self._depth:
            return
        self._depth -= 1
        if self._depth:
            return
        self._note(_END)
        outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if self._compares and outputs:  # Another rank may call the module once more instead.
            begin_backward = partial(self._compare, _BACKWARD)
            torch.autograd.graph.register_multi_grad_hook(outputs, begin_backward, mode="any")

    def _note(self, number: int) -> None:
        self._calls = (*self._calls, number)
        if not self._compares and self._calls not in self._beginnings:
            expected = [calls[-1] for calls in self._beginnings if calls[:-1] == self._calls[:-1]]
            raise self._refused(number, expected, "the first step")
        self._beginnings.add(self._calls)
        if self._compares:
            self._compare(number)

    def _compare(self, number: int, *_: Any) -> None:
        """Compares a call with those of the other ranks."""
        for group in self._groups:
            others = {*_extremes(number, group)} - {number}
            if others:
                raise self._refused(number, sorted(others), "another rank")

    def _refused(self, number: int, others: Sequence[int], whose: str) -> ModuleError:
        """Returns an error that names a unit which some have called and others not."""
        odd = max([number, *others])
        name = repr(self._names[odd]) if 0 <= odd < len(self._names) else "a part"
        return _refused(
            f"a forward pass {'does not call' if number < odd else 'calls'} {name} where {whose} does"
            f"{'' if number < odd else ' not'}, and strategies that shard parameters gather those of a part when it is "
            "called"
        )


class SameParameters:
    """A unit's `torch.distributed.fsdp` communication; ranks that reduced different sizes would crash or hang.

    The number of elements tells whether a rank has gradients of other parameters than in its first step, in which the
    ranks compare them.
    """

    def __init__(self, name: str, unit: nn.Module) -> None:
        """Takes a unit before it is sharded, and after those within it; its name is empty for the whole module."""
        from torch.distributed.fsdp import FSDPModule  # This is slow to import.

        self._name = name or type(unit).__name__
        inner_units = [part for part in unit.modules() if part is not unit and isinstance(part, FSDPModule)]
        of_others = {part for inner in inner_units for part in inner.modules()}
        self._parts = {prefix: part for prefix, part in unit.named_modules() if part not in of_others}
        self._shapes = {
            f"{prefix}.{name}".lstrip("."): parameter.shape
            for prefix, part in self._parts.items()
            for name, parameter in part.named_parameters(recurse=False)
        }
        # The number of elements in the first step, by which parameters are trained.
        self._counts: dict[tuple[bool, ...], int] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a tensor for the communication."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduces and scatters the gradients of the unit.

        Raises:
            ModuleError: This rank, or in the first step another one, has gradients of other parameters.
        """
        count = input_tensor.numel()
        parameters = (parameter for part in self._parts.values() for parameter in part._parameters.values())
        trained = tuple(parameter is not None and parameter.requires_grad for parameter in parameters)
        before = self._counts.get(trained, count)
        most, least = max(before, count), min(before, count)
        if trained not in self._counts and is_host(input_tensor.device):  # No step waits for an accelerator.
            most, least = _extremes(count, group)
        self._counts[trained] = most
        if least < most:
            raise self._refused(most - least, group.size())
        return _REDUCE_SCATTER(output_tensor, input_tensor, group=group, op=op, async_op=async_op)

    def _refused(self, missing: int, ranks: int) -> ModuleError:
        """Returns an error that names the parameters and parts which have that many elements, if there are any."""
        padded = {name: -(-shape[0] // ranks) * ranks * shape[1:].numel() for name, shape in self._shapes.items()}
        parts = {name: [p for p in padded if p.startswith(f"{name}.")] for name in self._parts if name}
        fits = [
            *(f"parameter {name!r}" for name in padded if padded[name] == missing),
            *(f"parameters of {name!r}" for name, inside in parts.items() if sum(padded[p] for p in inside) == missing),
        ]
        what = " or ".join(fits) if fits else f"parameters of {self._name!r}"
        return _refused(
            f"{what} got gradients in some steps or ranks only, which strategies that shard parameters cannot train"
        )
