"""The registry of adapters: what the core asks of modules whose library has conventions beyond torch's.

This is the only file of the core that names those libraries.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.imports import load_object
from sparktorch.errors import ModuleError, PersistenceError
from sparktorch.train.recipe.loss import TrainingStep
from sparktorch.train.recipe.recipe import Recipe

__all__ = ["Adapter", "adapted_parts", "adapter_of", "arguments", "without_caches"]

# The first adapter that recognises a module is its adapter. A LightningModule trains itself, whatever it holds; PEFT's
# models come before the models of transformers that they adapt.
_ADAPTERS = (
    "sparktorch.adapters.lightning.adapter:LightningAdapter",
    "sparktorch.adapters.peft:PeftAdapter",
    "sparktorch.adapters.huggingface.adapter:HuggingFaceAdapter",
)


class Adapter:
    """What a library's modules have beyond torch's conventions; this one, which most modules get, adds nothing.

    An adapter recognises its modules by the names of their classes: whoever has none of a library does not import it.

    Attributes:
        recipe: The class of recipes that make such a module, and build what takes part in its training.
        brings_training: Whether the module brings its loss, optimizer and schedule.
        has_frozen_base: Whether most of the module is a frozen base that its source makes again; see `FrozenBase`.
    """

    recipe: ClassVar[type[Recipe]] = Recipe
    brings_training: ClassVar[bool] = False
    has_frozen_base: ClassVar[bool] = False

    def recognises(self, source: Any) -> bool:
        """Whether an instance, a class, or what else a user may pass as module is of the library; imports nothing."""
        return True

    def recipe_fields(
        self, source: Any, params: Mapping[str, Any], *, seed: int, in_place: bool = False, complete: bool = False
    ) -> dict[str, Any]:
        """Returns the fields of a `Recipe` that make the module of what a user has passed.

        `seed` draws weights that a folder lacks, unless each worker reads it `in_place`; if weights must be `complete`,
        none may be lacking. Raises a `ModuleError` if the source cannot be read.
        """
        return {"module": source, "module_params": params}

    def loss_step(self, source: Any) -> TrainingStep | None:
        """Returns the training step for the loss that a module has itself; `None` if it has none."""
        return None

    def argument_names(self, module: Any, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the names by which a module takes inputs of these names; `()` if it takes them by their order."""
        return ()

    def call(self, module: Any, inputs: Sequence[torch.Tensor], names: Sequence[str], plain: Any = None) -> Any:
        """Calls a module with inputs of these names; `plain` is the user's where `module` is what wraps it."""
        named = self.argument_names(module if plain is None else plain, tuple(names))
        return module(**dict(zip(named, inputs, strict=True))) if named else module(*inputs)

    def ignores_padding(self, module: nn.Module) -> bool:
        """Whether a module computes the same of rows with less padding behind them."""
        return False

    def rebuildable(self, module: Any) -> dict[str, Any] | None:
        """Returns the fields of a `Recipe` that make a module like an instance from plain values; `None` if none do."""
        return None

    def write(self, module: Any, folder: str, labels: Sequence[str], preprocessor: Any = None) -> None:
        """Writes a module, and what prepares its inputs, as a folder that its library opens; `labels` name classes."""
        if Path(folder).is_file():
            raise PersistenceError(f"{folder} is a file", hint="name a folder, which is made if it is missing")
        module.save_pretrained(folder)
        if preprocessor is not None:
            preprocessor.save_pretrained(folder)

    def to_json(self, value: Any) -> dict[str, Any] | None:
        """Returns a value of a Param, such as a configuration, as JSON; `None` for any other value."""
        return None

    def from_json(self, kind: Any, values: dict[str, Any]) -> Any:
        """Returns the value that `to_json` was called with; `None` if `kind` is no class of such values."""
        return None


_PLAIN = Adapter()


@cache
def _adapters() -> tuple[Adapter, ...]:
    return tuple(load_object(path)() for path in _ADAPTERS)


def adapter_of(source: Any) -> Adapter:
    """Returns the adapter of a module, its class or import path, or of what else a user may pass as module."""
    adapter = _recognised(source)
    if adapter is _PLAIN and isinstance(source, str):
        with suppress(ModuleError):  # Only the ranks may be able to import it.
            adapter = _recognised(load_object(source))
    return adapter


def _recognised(source: Any) -> Adapter:
    for adapter in _adapters():
        if adapter.recognises(source):
            return adapter
    return _PLAIN


def adapted_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the parts of a module, itself included, that are mostly a frozen base, by their paths."""
    return {path: part for path, part in module.named_modules() if adapter_of(part).has_frozen_base}


def arguments(batch: Batch, plain: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with which its adapter calls a module for a batch."""

    def taken(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    passed: tuple[tuple[Any, ...], dict[str, Any]] = adapter_of(plain).call(taken, batch.inputs, batch.names, plain)
    return passed


def without_caches(module: nn.Module) -> nn.Module:
    """Returns the module; parts that are configured to make a cache make none, which all passes would share."""
    part: Any
    for part in module.modules():
        if getattr(getattr(part, "config", None), "use_cache", False):
            part.config = copy.copy(part.config)  # It may be the one of the class.
            part.config.use_cache = False
    return module
