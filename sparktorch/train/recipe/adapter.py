"""The registry of adapters: what the core asks about modules whose library has conventions beyond torch's.

No other file of the core names these libraries.
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

# The first adapter that recognises a module is its adapter. A LightningModule trains itself, whatever modules it holds,
# so it comes first. PEFT's models come before the models of transformers that they adapt.
_ADAPTERS = (
    "sparktorch.adapters.lightning.adapter:LightningAdapter",
    "sparktorch.adapters.peft:PeftAdapter",
    "sparktorch.adapters.huggingface.adapter:HuggingFaceAdapter",
)


class Adapter:
    """What a library's modules have beyond torch's conventions. Most modules get this class, which adds nothing.

    An adapter recognises its modules by the names of their classes, so that nobody imports a library without need.

    Attributes:
        recipe: The class of the recipes that make such a module, and that build the other parts of its training.
        brings_training: Whether the module brings its loss, optimizer and schedule.
        has_frozen_base: Whether most of the module is a frozen base, which its source can make again; see `FrozenBase`.
    """

    recipe: ClassVar[type[Recipe]] = Recipe
    brings_training: ClassVar[bool] = False
    has_frozen_base: ClassVar[bool] = False

    def recognises(self, source: Any) -> bool:
        """Returns whether a value that a user passes as module comes from the library; imports nothing."""
        return True

    def recipe_fields(
        self, source: Any, params: Mapping[str, Any], *, seed: int, in_place: bool = False, complete: bool = False
    ) -> dict[str, Any]:
        """Returns the fields of a `Recipe` that make the module from `source`, which a user has passed.

        Weights that a folder lacks are drawn from `seed`, unless each worker reads the folder `in_place`. If weights
        must be `complete`, none may be lacking. A `ModuleError` says that the source cannot be read.
        """
        return {"module": source, "module_params": params}

    def loss_step(self, source: Any) -> TrainingStep | None:
        """Returns the training step for the module's own loss; `None` if the module has none."""
        return None

    def argument_names(self, module: Any, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the names of the module's arguments for these inputs; `()` if it takes inputs by their order."""
        return ()

    def call(self, module: Any, inputs: Sequence[torch.Tensor], names: Sequence[str], plain: Any = None) -> Any:
        """Calls a module with inputs of these names; `plain` is the user's module if `module` wraps it."""
        named = self.argument_names(module if plain is None else plain, tuple(names))
        return module(**dict(zip(named, inputs, strict=True))) if named else module(*inputs)

    def ignores_padding(self, module: nn.Module) -> bool:
        """Returns whether a module computes the same for rows with less padding at their ends."""
        return False

    def rebuildable(self, module: Any) -> dict[str, Any] | None:
        """Returns the fields of a `Recipe` that make a module like this instance from plain values.

        It returns `None` if plain values cannot make it.
        """
        return None

    def write(self, module: Any, folder: str, labels: Sequence[str], preprocessor: Any = None) -> None:
        """Writes a module as a folder that its library opens, and into it the `preprocessor` of the module's inputs.

        `labels` are the names of the classes. A `PersistenceError` says that there is a file instead of a folder.
        """
        if Path(folder).is_file():
            raise PersistenceError(f"{folder} is a file", hint="name a folder, which is made if it is missing")
        module.save_pretrained(folder)
        if preprocessor is not None:
            preprocessor.save_pretrained(folder)

    def to_json(self, value: Any) -> dict[str, Any] | None:
        """Returns the value of a Param as JSON, if it belongs to the library, such as a configuration; else `None`."""
        return None

    def from_json(self, kind: Any, values: dict[str, Any]) -> Any:
        """Returns the value that `to_json` was called with; `None` if `kind` is not the class of such a value."""
        return None


_PLAIN_ADAPTER = Adapter()


@cache
def _adapters() -> tuple[Adapter, ...]:
    return tuple(load_object(path)() for path in _ADAPTERS)


def adapter_of(source: Any) -> Adapter:
    """Returns the adapter for a value that a user passes as module, such as an instance, its class or import path."""
    adapter = _find_adapter(source)
    if adapter is _PLAIN_ADAPTER and isinstance(source, str):
        with suppress(ModuleError):  # It may be that only the ranks can import the module.
            adapter = _find_adapter(load_object(source))
    return adapter


def _find_adapter(source: Any) -> Adapter:
    for adapter in _adapters():
        if adapter.recognises(source):
            return adapter
    return _PLAIN_ADAPTER


def adapted_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the parts of a module that are mostly a frozen base, by their paths; the module itself may be a part."""
    return {path: part for path, part in module.named_modules() if adapter_of(part).has_frozen_base}


def arguments(batch: Batch, plain: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with which its adapter calls a module for a batch."""

    def record(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    recorded: tuple[tuple[Any, ...], dict[str, Any]] = adapter_of(plain).call(record, batch.inputs, batch.names, plain)
    return recorded


def without_caches(module: nn.Module) -> nn.Module:
    """Sets the module's parts to make no cache, which all passes would share; returns the module."""
    part: Any
    for part in module.modules():
        if getattr(getattr(part, "config", None), "use_cache", False):
            part.config = copy.copy(part.config)  # All instances of the class may share the configuration.
            part.config.use_cache = False
    return module
