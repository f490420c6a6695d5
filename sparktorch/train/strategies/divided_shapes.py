"""Whether layers that a plan divides fit each other, tried in one process and before the job."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError
from sparktorch.train.pipeline.arguments import Arguments
from sparktorch.train.pipeline.recording import Twin
from sparktorch.train.recipe.huggingface import arguments

__all__ = ["check_shapes", "check_width"]

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
    args, kwargs = arguments(batch, module)
    kwargs.pop("labels", None)
    given, trial = Arguments.of(args, kwargs), _Trial(size)
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
        place, names = trial.place or type(module).__name__, ", ".join(map(repr, reversed(trial.cut)))
        raise ModuleError(
            f"strategyParams.plan: in each of {size} ranks, {place} fails with a part of an output that is divided by "
            f"'colwise', of {names}: {error}",
            hint="divide what takes it by 'rowwise', or what returns it by 'colwise_gather_output'",
            param=_PARAM,
        ) from error


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
