"""Whether layers that a plan divides fit each other, tried in one process and before the job."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError
from sparktorch.train.numerics.determinism import untouched_generators
from sparktorch.train.pipeline.arguments import Arguments
from sparktorch.train.pipeline.recording import Twin, without_caches
from sparktorch.train.recipe.huggingface import arguments

__all__ = ["check_shapes", "check_values", "check_width"]

_PARAM = "strategyParams"


def check_width(name: str, size: int, part: Any, inputs: Any) -> None:
    """Refuses an input of a layer that is divided by "rowwise" which is not divided; a hook.

    Raises:
        ModuleError: It has another number of features than a part.
    """
    width = inputs[0].shape[-1]
    if width * size != part.in_features:
        raise ModuleError(
            f"{name!r} is divided by 'rowwise' and gets {width} features in each of {size} ranks, not "
            f"{part.in_features // size}",
            hint="what it takes must be the divided output of a 'colwise' layer",
            param=_PARAM,
        )


def check_shapes(module: nn.Module, styles: Mapping[str, str], size: int, batch: Batch) -> None:
    """Calls a copy of a module, without values, whose divided layers return and take as many numbers as in a rank.

    It is called as in training. Nothing is said of a module that cannot be called with a batch, as one of which a
    training step uses parts, that looks at values, or that cannot be copied.

    Args:
        module: The module.
        styles: The style of each layer that is divided, by its name.
        size: Number of ranks that share a layer.
        batch: A few rows.

    Raises:
        ModuleError: A layer gets a part where it takes all numbers, or all where it takes a part.
    """
    given, trial = _given(module, batch), _Trial(size)
    try:
        whole, parts = (Twin(module, torch.device("cpu")) for _ in range(2))  # what one call keeps is none of the other
        whole.call(given.call, given.tensors)
        trial.watch(parts.module, styles)
    except Exception:
        return
    try:
        parts.call(given.call, given.tensors)
    except ModuleError:
        raise
    except Exception as error:
        if not trial.cut:
            return
        raise _fails(trial.place or type(module).__name__, size, trial.cut, error) from error


def check_values(module: nn.Module, styles: Mapping[str, str], size: int, batch: Batch) -> None:
    """Refuses plans by which a rank computes something else than the whole module.

    A copy of the module with the same parameters is called twice in evaluation, the second time with a rank's columns
    of divided outputs alone. What "rowwise" layers take must be the rank's columns of what they took in the first call,
    and what the module returns must be the same. Nothing is said of a module without values, of one that cannot be
    copied or called, or that draws other numbers for other shapes.

    Args:
        module: The module.
        styles: The style of each layer that is divided, by its name.
        size: Number of ranks that share a layer.
        batch: A few rows.

    Raises:
        ModuleError: A rank computes something else.
    """
    given = _given(module, batch)
    if any(isinstance(tensor, FakeTensor) for tensor in (*module.parameters(), *given.tensors)):
        return
    for rank in {0, size - 1}:
        comparison = _Comparison(module, styles, size, rank)
        try:
            comparison.whole(given)
        except Exception:
            return
        comparison.part(given)
        if comparison.differs and not comparison.draws(given):
            divided = ", ".join(map(repr, comparison.divided))
            raise ModuleError(
                f"strategyParams.plan: {comparison.differs} differs from that of the whole module, with the columns "
                f"that it has of what is divided by 'colwise': {divided}",
                hint="between 'colwise' and 'rowwise', functions must take each column by itself, as activations do, "
                "or each head of a fixed size, as by view(..., -1, head_size); divide the layer by "
                "'colwise_gather_output', or leave both whole",
                param=_PARAM,
            )


def _fails(place: str, size: int, cut: dict[str, None], error: Exception) -> ModuleError:
    """Returns the error of a part that fails in a rank."""
    return ModuleError(
        f"strategyParams.plan: in each of {size} ranks, {place} fails with a part of an output that is divided by "
        f"'colwise', of {', '.join(map(repr, reversed(cut)))}: {error}",
        hint="divide what takes it by 'rowwise', or what returns it by 'colwise_gather_output'",
        param=_PARAM,
    )


def _given(module: nn.Module, batch: Batch) -> Arguments:
    """Returns what a module is called with, but for labels, of which one of transformers computes its loss."""
    args, kwargs = arguments(batch, module)
    kwargs.pop("labels", None)
    return Arguments.of(args, kwargs)


class _Comparison:
    """Calls of a module, of which one is with one rank's columns of divided outputs.

    Attributes:
        divided: Names of the layers whose outputs were divided, in the order of their calls.
        differs: What is another in a rank; empty if nothing is.
    """

    def __init__(self, module: nn.Module, styles: Mapping[str, str], size: int, rank: int) -> None:
        self.divided: dict[str, None] = {}
        self.differs = ""
        self._size, self._rank = size, rank
        self._module, self._styles = module, styles
        self._taken: list[torch.Tensor] = []  # what "rowwise" layers took in the first call, one after another
        self._returned: list[torch.Tensor] = []  # and what they returned
        self._found: list[torch.Tensor] = []

    def whole(self, given: Arguments) -> None:
        """Calls the module as it is."""

        def keep(part: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self._taken.append(inputs[0].clone())
            self._returned.append(output.clone())

        self._found = self._call(given, lambda name, part: part.register_forward_hook(keep))

    def part(self, given: Arguments) -> None:
        """Calls it as a rank does, and compares.

        Raises:
            ModuleError: It fails with a rank's columns.
        """
        expected = iter(zip(self._taken, self._returned, strict=True))
        returned: list[torch.Tensor] = []

        def compare(name: str, part: Any, inputs: Any) -> Any:
            taken, summed = next(expected)
            returned.append(summed)
            if not self.differs and not _close(inputs[0], self._own(taken)):
                self.differs = f"what {name!r} takes in a rank"
            return _filled(part, inputs)

        def watch(name: str, part: nn.Module) -> None:
            part.register_forward_pre_hook(partial(compare, name))
            part.register_forward_hook(lambda part, inputs, output: returned.pop())  # the sum over the ranks

        try:
            found = self._call(given, watch, cut=True)
        except Exception as error:
            if self.differs:
                return
            raise _fails(type(self._module).__name__, self._size, self.divided, error) from error
        if not all(map(_close, found, self._found)):
            self.differs = self.differs or f"what {type(self._module).__name__} returns"

    def draws(self, given: Arguments) -> bool:
        """Whether the module, as it is, is another one with another seed."""
        other = _Comparison(self._module, self._styles, self._size, self._rank)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch.initial_seed() + 1)
            other.whole(given)
        return not all(map(_close, other._taken + other._found, self._taken + self._found))

    def _call(self, given: Arguments, watch: Callable[[str, nn.Module], Any], *, cut: bool = False) -> list[Any]:
        """Calls a copy of the module, for what one call keeps is none of the other; returns the tensors."""
        same: dict[int, Any] = {id(parameter): parameter for parameter in self._module.parameters()}
        module = without_caches(copy.deepcopy(self._module, same)).eval()  # dropout draws other numbers for a part
        for name, part in module.named_modules():
            if self._styles.get(name) == "colwise":
                part.register_forward_hook(partial(self._change, name, cut))
            if self._styles.get(name) == "rowwise" and isinstance(part, nn.Linear):
                watch(name, part)
        tensors = [tensor.clone() for tensor in given.tensors]  # which the module may change in place
        with untouched_generators(torch.device("cpu")), torch.no_grad():
            found = pytree.tree_leaves(given.call(module, *tensors))
        return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the rank's columns."""
        return tensor.chunk(self._size, -1)[self._rank]

    def _change(self, name: str, cut: bool, part: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """Gives a divided layer other outputs, which are not all equal."""
        self.divided[name] = None
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        other = output + noise * (1 + output.abs())
        return self._own(other).contiguous() if cut else other


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True)


class _Trial:
    """Hooks that leave layers the numbers of one rank.

    Attributes:
        cut: Names of the layers whose outputs were cut, in the order of their calls.
    """

    def __init__(self, size: int) -> None:
        self.cut: dict[str, None] = {}
        self._size = size
        self._called: list[str] = []  # what is being called, the outer parts first

    @property
    def place(self) -> str:
        """The name of the part that is being called, in quotes; empty if it is the module itself."""
        return repr(self._called[-1]) if self._called and self._called[-1] else ""

    def watch(self, module: nn.Module, styles: Mapping[str, str]) -> None:
        for name, part in module.named_modules():
            before, after = part.register_forward_pre_hook, part.register_forward_hook
            before(partial(self._enter, name))
            if styles.get(name) in ("colwise", "rowwise"):
                before(partial(_check_positional, name))
            if styles.get(name) == "rowwise" and isinstance(part, nn.Linear):
                before(partial(check_width, name, self._size))
                before(_filled)
            if styles.get(name) == "colwise":
                after(partial(self._cut, name))
            after(self._leave)

    def _enter(self, name: str, part: nn.Module, inputs: Any) -> None:
        self._called.append(name)

    def _leave(self, part: nn.Module, inputs: Any, output: Any) -> None:
        self._called.pop()

    def _cut(self, name: str, part: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.cut[name] = None
        return output[..., : output.shape[-1] // self._size]


def _check_positional(name: str, part: nn.Module, inputs: Any) -> None:
    if not inputs:
        raise ModuleError(
            f"{name!r} is divided, and its input is passed by keyword",
            hint="pass it by position",
            param=_PARAM,
        )


def _filled(part: Any, inputs: Any) -> Any:
    """Fills a part with zeros up to what the whole layer takes; a hook."""
    return (nn.functional.pad(inputs[0], (0, part.in_features - inputs[0].shape[-1])), *inputs[1:])
