"""Models of transformers from folders and configurations, as fields of a `Recipe`, and back into a folder.

Weights may be read one at a time, under the names that a model has: `from_pretrained` renames what older versions have
saved, adds or removes the name of the model without its head, and makes some parameters of several saved tensors, as
those of experts. Rules, and what they do, are transformers' own here, too.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sparktorch.adapters.huggingface.models import is_config, is_folder, is_model
from sparktorch.base.deferred import Deferred, PartialWeights
from sparktorch.base.imports import import_path, transformers
from sparktorch.base.state_dict import pack_state
from sparktorch.base.weights_folder import WeightsFolder, is_weights_folder
from sparktorch.errors import ModuleError, nearest, refusing

__all__ = [*("ConvertedWeights", "classifier_in", "config_in", "has_new_weights"), *("opened", "rebuildable", "stamp")]

_LOG = logging.getLogger(__name__)

_SILENT = ("gradient_checkpointing",)  # transformers reads these entries, which no configuration has.
# A configuration keeps these, and leaves them out of its JSON.
_CHOICES = ("attn_implementation", "experts_implementation")
_MOST_NAMES = 6  # A message names so many parameters.


def opened(
    module: Any, params: Mapping[str, Any], *, seed: int, in_place: bool = False, complete: bool = False
) -> dict[str, Any] | None:
    """Returns the fields of a `Recipe` for a configuration or a folder; `None` for any other module.

    `params` replace entries of the configuration; `seed` draws the weights that the folder lacks, unless each worker
    reads it `in_place`. If it is to be `complete`, none may be lacking. A `ModuleError` says that the folder holds
    no model, or that the configuration does not say of which class.
    """
    if is_config(module):
        return _described(_class_of(module), _changed(module, params))
    if not is_folder(module):
        return None
    folder = os.path.abspath(module)
    config = config_in(folder)
    if in_place:
        config = _changed(config, params)
        if not is_weights_folder(folder):
            hint = "write them with save_pretrained(folder), or leave modelDir out"
            raise ModuleError(
                f"{folder} holds no weights as safetensors", hint=hint, param="module", code="ST-MODEL-FOLDER"
            )
        return {**_described(_class_of(config), config), "initial": WeightsFolder(folder)}
    fields, weights, lacking = _read(folder, json.dumps(dict(params), sort_keys=True), seed, stamp(folder))
    if complete and lacking:
        hint = "train it first: the values would be random"
        raise ModuleError(
            f"{folder} has no values for {', '.join(lacking)}", hint=hint, param="module", code="ST-MODEL-FOLDER"
        )
    return {**fields, "initial": weights}


def rebuildable(module: Any) -> dict[str, Any] | None:
    """Returns the fields of a `Recipe` that make a module like an instance of a transformers model, or `None`.

    The user may have changed the instance; then its class and configuration make another.
    """
    if not is_model(module) or import_path(type(module)) is None:
        return None
    config = _of_dtype(copy.deepcopy(module.config), module.dtype)
    try:
        with torch.device("meta"):
            rebuilt = type(module)(copy.deepcopy(config))
    except Exception:
        return None
    shapes, rebuilt_shapes = (
        {name: tensor.shape for name, tensor in model.state_dict().items()} for model in (module, rebuilt)
    )
    same = shapes == rebuilt_shapes and repr(module) == repr(rebuilt)
    return _described(type(module), config) if same else None


def config_in(folder: str) -> Any:
    """Returns the configuration in a folder; a `ModuleError` says that there is none, or none that can be read."""
    if not (Path(folder) / "config.json").is_file():
        hint = "give the path of a folder that save_pretrained wrote, on this machine"
        raise ModuleError(
            f"{folder} holds no model: there is no config.json", hint=hint, param="module", code="ST-MODEL-FOLDER"
        )
    hint = "give a folder that save_pretrained wrote, with no later version of transformers than that here"
    with refusing(f"the config.json in {folder} cannot be read", hint, param="module"):
        return transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def has_new_weights(folder: str) -> bool:
    """Whether most vectors among the weights, such as biases, are all 0 or all 1, as transformers initializes them.

    A step of any training changes them. False where the folder has no weights as safetensors, or no vectors.
    """
    return is_weights_folder(folder) and _are_new(folder, stamp(folder))


@functools.lru_cache(maxsize=4)
def _are_new(folder: str, _: tuple[tuple[str, int], ...]) -> bool:
    weights = WeightsFolder(folder)
    vectors = [tensor for tensor in map(weights.__getitem__, weights) if tensor.dim() == 1 and len(tensor)]
    constant = sum(bool(torch.all(vector == vector[0]) and vector[0] in (0, 1)) for vector in vectors)
    return 2 * constant > len(vectors)


def classifier_in(folder: str, auto: str, classes: int | None) -> dict[str, Any]:
    """Returns the entries of a folder's configuration that make its model a classifier, one that `auto` names."""
    config, classes_by_config = config_in(folder), getattr(transformers(), auto)._model_mapping
    if type(config) not in classes_by_config:
        raise ModuleError(
            f"{auto} knows no {config.model_type}",
            hint="use TorchClassifier",
            param="modelFolder",
            code="ST-MODEL-FOLDER",
        )
    more = {} if classes in (None, config.num_labels) else {"num_labels": classes}
    architecture = classes_by_config[type(config)].__name__
    return {"architectures": [architecture], "problem_type": "single_label_classification", **more}


def stamp(folder: str) -> tuple[tuple[str, int], ...]:
    """Returns the files in a folder and when they were written, as the key of what was read from them."""
    files = filter(Path.exists, Path(folder).iterdir())  # A link may lead nowhere.
    return tuple(sorted((file.name, file.stat().st_mtime_ns) for file in files))


def _untied(folder: str, model: Any, name: str, twin: str) -> ModuleError:
    """Returns the error for two values of one parameter, which transformers would not tie, and its module does."""
    what = f"{name!r} and {twin!r} in {folder} differ, and are one parameter of {type(model).__qualname__}"
    hint = "set tie_word_embeddings to false, in config.json or moduleParams; or keep one of them in the folder"
    return ModuleError(what, hint=hint, param="module")


def _described(kind: type, config: Any, chosen: Any = None) -> dict[str, Any]:
    """Returns an import path and JSON of a class and a configuration; `chosen` has its choices if it has lost them."""
    values = json.loads(config.to_json_string(use_diff=False))
    choices = {name: getattr(chosen or config, f"_{name}_internal", None) for name in _CHOICES}
    values |= {name: choice for name, choice in choices.items() if isinstance(choice, str)}
    return {"module": import_path(kind), "module_params": {"config": values}}


def _class_of(config: Any) -> Any:
    """Returns the class of model that a configuration names."""
    names = config.architectures or ()
    kind = getattr(transformers(), names[0], None) if names else None
    if kind is not None:
        return kind
    what = f"the {type(config).__qualname__} names {f'{names[0]!r}, unknown' if names else 'no class of models'}"
    raise ModuleError(what, hint="set its architectures, such as ['BertForSequenceClassification']", param="module")


def _changed(config: Any, params: Mapping[str, Any], *, within: bool = False) -> Any:
    """Returns a copy of a configuration in float32 with other values; dicts change entries of configurations in it.

    A choice of how attention is computed must hold for all: in one `within` another, JSON would lose it.
    """
    changed, kind = _of_dtype(copy.deepcopy(config), torch.float32), type(config).__qualname__
    for name, value in params.items():
        what = hint = ""
        if name in _CHOICES and (within or not isinstance(value, str | None)):
            what = f"{name} of {kind} cannot be {value!r}: one choice holds for the whole model"
            hint = f"set moduleParams={{{name!r}: 'eager'}} or another of transformers' names"
        name = f"_{name}" if name in _CHOICES else name
        if not hasattr(changed, name) and name not in _SILENT:
            what, hint = f"the {kind} has no entry {name!r}", nearest(name, {"num_labels", *changed.to_dict()})
        if what:
            raise ModuleError(what, hint=hint, param="moduleParams")
        below = getattr(changed, name, None)
        if is_config(below) and isinstance(value, Mapping):
            value = _changed(below, value, within=True)
        with refusing(f"{name} of {kind} cannot be {value!r}", param="moduleParams"):
            setattr(changed, name, value)
    return changed


def _of_dtype(config: Any, dtype: torch.dtype) -> Any:
    """Sets the dtype of a configuration and of those in it, by which transformers makes the models within a model."""
    config.dtype = dtype
    for below in filter(is_config, vars(config).values()):
        _of_dtype(below, dtype)
    return config


@functools.lru_cache(maxsize=1)  # The settings of a search share one copy of the weights.
def _read(
    folder: str, params: str, seed: int, _: tuple[tuple[str, int], ...]
) -> tuple[dict[str, Any], bytes, tuple[str, ...]]:
    """Reads the configuration and weights of a folder, and the names of those that it lacks."""
    changed = json.loads(params)
    other_head = not changed.keys().isdisjoint({"num_labels", "id2label"})
    options = {"dtype": torch.float32, "local_files_only": True, "ignore_mismatched_sizes": other_head}
    options["output_loading_info"] = True
    hint = "to train from new weights, pass its configuration: transformers.AutoConfig.from_pretrained(folder)"
    with refusing(f"the model in {folder} cannot be read", hint, param="module"), torch.random.fork_rng(devices=()):
        config = _changed(config_in(folder), changed)
        kind = _class_of(config)
        torch.manual_seed(seed)
        model, info = kind.from_pretrained(folder, config=config, **options)
    for name, twin in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(name) is not model.get_parameter_or_buffer(twin):
            raise _untied(folder, model, twin, name)
    # transformers removes an entry that no configuration has from the one that it has made the model with.
    fields = _described(kind, _changed(model.config, changed), config)
    lacking = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    return fields, pack_state(model.state_dict()), tuple(sorted(lacking))


@dataclass
class _Source:
    """What a parameter is made of: saved tensors, each with the part of the rule that asks for it, by that rule."""

    name: str  # Where a rule makes several parameters, it is the first one's.
    dtype: torch.dtype
    rule: Any = None  # A single saved tensor that stays as it is has none.
    tensors: list[tuple[str, str]] = field(default_factory=list)


class ConvertedWeights(PartialWeights):
    """A model's parameters and buffers by name, as far as a folder has them; each is made when it is asked for.

    Attributes:
        unknown: What is in the folder and not in the model, by the names that transformers' rules make of those there.
    """

    def __init__(self, model: Any, saved: WeightsFolder) -> None:
        """Takes a model of transformers, which needs no values, and what is saved."""
        self._model, self._saved, kind = model, saved, type(model).__qualname__
        if getattr(model.config, "quantization_config", None) is not None:
            raise self._wrong("are quantized", "leave modelDir out, or give a folder with weights that are not")
        self.unknown: list[str] = []
        state = model.state_dict()
        self._sources = self._matched(state)
        other_head = self._shapes_of_other_head()
        for name in list(self._sources):
            shape = self._parameter(name, "meta").shape
            if shape != state[name].shape and shape == other_head.get(name):
                del self._sources[name]
            elif shape != state[name].shape:
                raise self._wrong(
                    f"do not fit: {name!r} has the shape {tuple(shape)}, and that of {kind} has "
                    f"{tuple(state[name].shape)}",
                    "config.json and moduleParams must fit the weights, but for num_labels",
                )
        if not self._sources:
            raise self._wrong(f"are not those of {kind}", "config.json and the weights must be those of one model")
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            twin = first.setdefault(id(tensor), name) if name in self else name
            if twin != name and not torch.equal(self[twin], self[name]):
                raise _untied(saved.path, model, twin, name)

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

    def _matched(self, state: Mapping[str, torch.Tensor]) -> dict[str, _Source]:
        """Returns the source of each parameter that the folder has, as transformers matches them."""
        loading: Any = import_module("transformers.core_model_loading")
        rules = import_module("transformers.conversion_mapping").get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix, sources = self._model.base_model_prefix, dict[str, _Source]()
        for key in sorted(self._saved, key=loading.dot_natural_key):  # Some rules depend on the order.
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = loading.rename_source_key(key, [], [], prefix, state)
            if name not in state:
                self.unknown.append(name)
                continue
            source = sources.setdefault(name, _Source(name, state[name].dtype, by_pattern.get(pattern)))
            source.tensors.append((pattern or key, key))
        for source in [source for source in sources.values() if source.rule is not None]:
            for name in self._converted(source, "meta"):  # One rule may make several.
                sources.setdefault(name, source)
        return {name: source for name, source in sources.items() if name in state}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns a parameter, on the CPU."""
        return self._parameter(name, "cpu")

    def __contains__(self, name: object) -> bool:
        """Whether the folder has a parameter; reads nothing."""
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def _parameter(self, name: str, device: str) -> torch.Tensor:
        """Returns a parameter; on the "meta" device, its shape alone."""
        source = self._sources[name]
        if source.rule is None:
            return self._read(source.tensors[0][1], device, source.dtype)
        return self._converted(source, device)[name]

    def _converted(self, source: _Source, device: str) -> dict[str, torch.Tensor]:
        """Returns what a rule makes, by name; it cannot if tensors are lacking."""
        rule = copy.deepcopy(source.rule)
        for pattern, key in source.tensors:
            rule.add_tensor(source.name, key, pattern, functools.partial(self._read, key, device, source.dtype))
        what = f"the weights in {self._saved.path} lack tensors of {source.name!r}, or have some of other shapes"
        hint = "the folder must have all the files and tensors that save_pretrained wrote"
        with refusing(what, hint, param="module"):
            converted = rule.convert(source.name, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def _read(self, key: str, device: str, dtype: torch.dtype) -> torch.Tensor:
        return self._saved[key].to(device, dtype)

    def log_differences(self, built: Deferred) -> None:
        """Logs what the model has and its folder has not, and the reverse, but for what transformers passes over."""
        differences = SimpleNamespace(missing_keys=set(built.lacking), unexpected_keys=set(self.unknown))
        self._model._adjust_missing_and_unexpected_keys(differences)
        lacking = [name for name in built.lacking if name in differences.missing_keys]
        if lacking:
            _LOG.warning("new in the model, as the folder has no values for them: %s", _listed(lacking))
        unknown = [name for name in self.unknown if name in differences.unexpected_keys]
        if unknown:
            _LOG.warning("in the folder, and not in the model: %s", _listed(unknown))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
