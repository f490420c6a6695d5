"""Whether layers that a plan divides fit each other, tried in one process and before the job."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError
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


@torch.no_grad()
def check_shapes(module: nn.Module, styles: Mapping[str, str], size: int, batch: Batch) -> None:
    """Calls a module whose divided layers return and take as many numbers as in a rank.

    It says nothing of a module that cannot be called with a batch, as one of which a training step uses parts.

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
    trial = _Trial(size)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.random.fork_rng(devices=()):
            try:
                module(*args, **kwargs)
            except Exception:
                return
            trial.watch(module, styles)
            module(*args, **kwargs)
    except ModuleError:
        raise
    except Exception as error:
        place = trial.place or type(module).__name__
        raise ModuleError(
            f"strategyParams.plan: in each of {size} ranks, {place} fails with a part of the output of {trial.cut!r}, "
            f"which is divided by 'colwise': {error}",
            hint=f"divide what takes it by 'rowwise', or {trial.cut!r} by 'colwise_gather_output'",
            param=_PARAM,
        ) from error
    finally:
        trial.end()
        for part, mode in modes.items():
            part.training = mode


class _Trial:
    """Hooks that leave layers the numbers of one rank.

    Attributes:
        cut: Name of the last layer whose output was cut.
    """

    def __init__(self, size: int) -> None:
        self.cut = ""
        self._size = size
        self._called: list[str] = []  # what is being called, the outer parts first
        self._hooks: list[Any] = []

    @property
    def place(self) -> str:
        """The name of the part that is being called, in quotes; empty if it is the module itself."""
        return repr(self._called[-1]) if self._called and self._called[-1] else ""

    def watch(self, module: nn.Module, styles: Mapping[str, str]) -> None:
        for name, part in module.named_modules():
            before, after = part.register_forward_pre_hook, part.register_forward_hook
            self._hooks.append(before(partial(self._enter, name)))
            if styles.get(name) == "rowwise" and isinstance(part, nn.Linear):
                self._hooks += [before(partial(check_width, name, self._size)), before(_filled)]
            if styles.get(name) == "colwise":
                self._hooks.append(after(partial(self._cut, name)))
            self._hooks.append(after(self._leave))

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str, part: nn.Module, inputs: Any) -> None:
        self._called.append(name)

    def _leave(self, part: nn.Module, inputs: Any, output: Any) -> None:
        self._called.pop()

    def _cut(self, name: str, part: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.cut = name
        return output[..., : output.shape[-1] // self._size]


def _filled(part: Any, inputs: Any) -> Any:
    """Fills a part with zeros up to what the whole layer takes; a hook."""
    return (nn.functional.pad(inputs[0], (0, part.in_features - inputs[0].shape[-1])), *inputs[1:])
