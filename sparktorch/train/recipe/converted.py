"""Weights in a folder of transformers' under the names that a model has, one at a time.

`from_pretrained` renames what older versions have saved, adds or removes the name of the model without its head, and
makes some parameters of several saved tensors, as those of experts. Rules, and what they do, are transformers' own
here, too.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sparktorch.base.deferred import Deferred
from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.errors import ModuleError, SparkTorchError
from sparktorch.train.recipe.pretrained import config_in, untied

__all__ = ["ConvertedWeights", "converted", "log_differences"]

_log = logging.getLogger(__name__)

_SHOWN = 6  # names in a message


@dataclass
class _Source:
    """What a parameter is made of.

    Attributes:
        name: Its name; where a rule makes several parameters, that of the first one.
        dtype: Its dtype.
        rule: The converter that makes it; `None` where it is one saved tensor.
        tensors: The saved tensors, each by the part of the rule that asks for it and by its name.
    """

    name: str
    dtype: torch.dtype
    rule: Any = None
    tensors: list[tuple[str, str]] = field(default_factory=list)


class ConvertedWeights(Mapping[str, torch.Tensor]):
    """A model's parameters and buffers by name, as far as a folder has them; each is made when it is asked for.

    Attributes:
        unknown: What is in the folder and not in the model, by the names that transformers' rules make of those there.
    """

    def __init__(self, model: Any, saved: WeightsFolder, other_head: Mapping[str, torch.Size] | None = None) -> None:
        """Takes a model and what is saved.

        Args:
            model: A model of transformers; it needs no values.
            saved: The folder.
            other_head: Shapes that the model would have with as many labels as that in the folder. What has these, and
                not those of the model, is left out, as that of a head for other labels.

        Raises:
            ModuleError: The folder has nothing of this model, lacks tensors of a parameter, or has two values for one;
                or its weights are quantized.
        """
        if getattr(model.config, "quantization_config", None) is not None:
            raise ModuleError(
                f"the weights in {saved.path} are quantized",
                hint="leave modelDir out, or give a folder with weights that are not",
                param="module",
            )
        self._model, self._saved = model, saved
        self.unknown: list[str] = []
        wanted = model.state_dict()
        self._sources = self._found(wanted)
        for name, source in list(self._sources.items()):
            shape = self._made(source, name, "meta").shape
            if shape == wanted[name].shape:
                continue
            if other_head is None or shape != other_head.get(name):
                raise ModuleError(
                    f"{name!r} in {saved.path} has the shape {tuple(shape)}, and that of {type(model).__qualname__} "
                    f"has {tuple(wanted[name].shape)}",
                    hint="config.json and moduleParams must fit the weights, but for num_labels",
                    param="module",
                )
            del self._sources[name]
        if not self._sources:
            raise ModuleError(
                f"the weights in {saved.path} are not those of {type(model).__qualname__}",
                hint="config.json and the weights must be those of one model",
                param="module",
            )
        self._check_tied()

    def _check_tied(self) -> None:
        """Checks that the folder has one value for what the model has under several names.

        Raises:
            ModuleError: It has several. transformers warns, and ties them not, unlike the config.
        """
        names: dict[int, str] = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if name in self and not self._alike(first := names.setdefault(id(tensor), name), name):
                raise untied(self._saved.path, self._model, first, name)

    def _alike(self, one: str, other: str) -> bool:
        """Whether two parameters are made of equal tensors; these are mapped, and not copied."""
        keys, others = ([key for _, key in self._sources[name].tensors] for name in (one, other))
        if keys == others:
            return True
        return len(keys) == len(others) and all(
            self._saved[key].dtype == self._saved[it].dtype and torch.equal(self._saved[key], self._saved[it])
            for key, it in zip(keys, others, strict=True)
        )

    def _found(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, _Source]:
        """Returns the source of each parameter that the folder has, as transformers matches them."""
        loading, rules = import_module("transformers.core_model_loading"), self._rules()
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix, found = self._model.base_model_prefix, dict[str, _Source]()
        for key in sorted(self._saved, key=loading.dot_natural_key):  # some rules depend on the order
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = loading.rename_source_key(key, [], [], prefix, wanted)
            if name not in wanted:
                self.unknown.append(name)
                continue
            source = found.setdefault(name, _Source(name, wanted[name].dtype, by_pattern.get(pattern)))
            source.tensors.append((pattern or key, key))
        for source in [source for source in found.values() if source.rule is not None]:
            for name in self._converted(source, "meta"):  # one rule may make several
                found.setdefault(name, source)
        return {name: source for name, source in found.items() if name in wanted}

    def _rules(self) -> list[Any]:
        rules: list[Any] = import_module("transformers.conversion_mapping").get_model_conversion_mapping(self._model)
        return rules

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns a parameter, on the CPU.

        Raises:
            PersistenceError: The folder cannot be read.
        """
        return self._made(self._sources[name], name, "cpu")

    def __contains__(self, name: object) -> bool:
        """Whether the folder has a parameter; reads nothing."""
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the parameters."""
        return iter(self._sources)

    def __len__(self) -> int:
        """Returns the number of parameters."""
        return len(self._sources)

    def _made(self, source: _Source, name: str, device: str) -> torch.Tensor:
        """Returns a parameter; on the "meta" device it has a shape alone, and nothing is read."""
        if source.rule is None:
            return self._read(source.tensors[0][1], device, source.dtype)
        return self._converted(source, device)[name]

    def _converted(self, source: _Source, device: str) -> dict[str, torch.Tensor]:
        """Returns what a rule makes, by name.

        Raises:
            ModuleError: It cannot, as tensors are lacking.
        """
        rule = copy.deepcopy(source.rule)
        for pattern, key in source.tensors:
            rule.add_tensor(source.name, key, pattern, partial(self._read, key, device, source.dtype))
        try:
            made = rule.convert(source.name, model=self._model, config=self._model.config)
        except SparkTorchError:
            raise
        except Exception as error:  # of torch, or of the rule
            raise ModuleError(
                f"{self._saved.path} lacks tensors of {source.name!r}, or has some of other shapes: {error}",
                hint="the folder must have all the files and tensors that save_pretrained wrote",
                param="module",
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _read(self, key: str, device: str, dtype: torch.dtype) -> torch.Tensor:
        return self._saved[key].to(device, dtype)


def converted(model: nn.Module, saved: WeightsFolder) -> ConvertedWeights:
    """Returns the weights in a folder of transformers' under the names of a model, which needs no values.

    Raises:
        ModuleError: They are not those of the model.
    """
    config: Any = copy.deepcopy(model.config)
    labels = config_in(saved.path).num_labels
    if labels == config.num_labels:
        return ConvertedWeights(model, saved)
    config.num_labels = labels
    with torch.device("meta"):
        other = type(model)(config)
    return ConvertedWeights(model, saved, {name: tensor.shape for name, tensor in other.state_dict().items()})


def log_differences(built: Deferred) -> None:
    """Logs what a model has and its folder has not, and the other way round, but for what transformers passes over."""
    if isinstance(built.saved, ConvertedWeights):
        model: Any = built.module
        found = SimpleNamespace(missing_keys=set(built.lacking), unexpected_keys=set(built.saved.unknown))
        model._adjust_missing_and_unexpected_keys(found)
        if lacking := [name for name in built.lacking if name in found.missing_keys]:
            _log.warning("new in the model, as the folder has no values for them: %s", _listed(lacking))
        if unknown := [name for name in built.saved.unknown if name in found.unexpected_keys]:
            _log.warning("in the folder, and not in the model: %s", _listed(unknown))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
