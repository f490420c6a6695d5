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

from sparktorch.base.deferred import Deferred
from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.errors import ModuleError, refusing
from sparktorch.train.huggingface.folder import config_in, untied

__all__ = ["ConvertedWeights", "log_differences"]

_log = logging.getLogger(__name__)

_SHOWN = 6  # names in a message


@dataclass
class _Source:
    """What a parameter is made of: saved tensors, each with the part of the rule that asks for it, by that rule."""

    name: str  # where a rule makes several parameters, that of the first one
    dtype: torch.dtype
    rule: Any = None  # none for one saved tensor as it is
    tensors: list[tuple[str, str]] = field(default_factory=list)


class ConvertedWeights(Mapping[str, torch.Tensor]):
    """A model's parameters and buffers by name, as far as a folder has them; each is made when it is asked for.

    Attributes:
        unknown: What is in the folder and not in the model, by the names that transformers' rules make of those there.
    """

    def __init__(self, model: Any, saved: WeightsFolder) -> None:
        """Takes a model of transformers, which needs no values, and what is saved.

        Raises:
            ModuleError: The folder has nothing of this model, lacks tensors of a parameter, or has two values for one;
                or its weights are quantized.
        """
        self._model, self._saved, kind = model, saved, type(model).__qualname__
        if getattr(model.config, "quantization_config", None) is not None:
            raise self._wrong("are quantized", "leave modelDir out, or give a folder with weights that are not")
        self.unknown: list[str] = []
        wanted = model.state_dict()
        self._sources = self._found(wanted)
        other_head = self._shapes_of_other_head()
        for name in list(self._sources):
            shape = self._made(name, "meta").shape
            if shape != wanted[name].shape and shape == other_head.get(name):
                del self._sources[name]
            elif shape != wanted[name].shape:
                raise self._wrong(
                    f"do not fit: {name!r} has the shape {tuple(shape)}, and that of {kind} has "
                    f"{tuple(wanted[name].shape)}",
                    "config.json and moduleParams must fit the weights, but for num_labels",
                )
        if not self._sources:
            raise self._wrong(f"are not those of {kind}", "config.json and the weights must be those of one model")
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            other = first.setdefault(id(tensor), name) if name in self else name
            if other != name and not torch.equal(self[other], self[name]):
                raise untied(saved.path, model, other, name)

    def _wrong(self, what: str, hint: str) -> ModuleError:
        return ModuleError(f"the weights in {self._saved.path} {what}", hint=hint, param="module")

    def _shapes_of_other_head(self) -> dict[str, torch.Size]:
        """Returns the shapes of a model with as many labels as the folder's; what has these, and no others, is new."""
        labels, config = config_in(self._saved.path).num_labels, copy.deepcopy(self._model.config)
        if labels == config.num_labels:
            return {}
        config.num_labels = labels
        with torch.device("meta"):
            return {name: tensor.shape for name, tensor in type(self._model)(config).state_dict().items()}

    def _found(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, _Source]:
        """Returns the source of each parameter that the folder has, as transformers matches them."""
        loading: Any = import_module("transformers.core_model_loading")
        rules = import_module("transformers.conversion_mapping").get_model_conversion_mapping(self._model)
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

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns a parameter, on the CPU."""
        return self._made(name, "cpu")

    def __contains__(self, name: object) -> bool:
        """Whether the folder has a parameter; reads nothing."""
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the parameters."""
        return iter(self._sources)

    def __len__(self) -> int:
        """Returns the number of parameters."""
        return len(self._sources)

    def _made(self, name: str, device: str) -> torch.Tensor:
        """Returns a parameter; on the "meta" device, its shape alone."""
        source = self._sources[name]
        if source.rule is None:
            return self._read(source.tensors[0][1], device, source.dtype)
        return self._converted(source, device)[name]

    def _converted(self, source: _Source, device: str) -> dict[str, torch.Tensor]:
        """Returns what a rule makes, by name; it cannot if tensors are lacking."""
        rule = copy.deepcopy(source.rule)
        for pattern, key in source.tensors:
            rule.add_tensor(source.name, key, pattern, partial(self._read, key, device, source.dtype))
        what = f"the weights in {self._saved.path} lack tensors of {source.name!r}, or have some of other shapes"
        hint = "the folder must have all the files and tensors that save_pretrained wrote"
        with refusing(what, hint, param="module"):
            made = rule.convert(source.name, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _read(self, key: str, device: str, dtype: torch.dtype) -> torch.Tensor:
        return self._saved[key].to(device, dtype)


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
