"""Reads transformers models from folders and configurations, as fields of a `Recipe`.

Each weight may be read by itself, under the name that the model has for it. `from_pretrained` renames what older
versions have saved, adds or removes the name of the model without its head, and makes some parameters, such as those of
experts, from several saved tensors. `ConvertedWeights` does the same, by transformers' own rules.
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

__all__ = [
    "ConvertedWeights",
    "classifier_in",
    "config_in",
    "has_new_weights",
    "opened",
    "rebuildable",
    "stamp",
]

_log = logging.getLogger(__name__)

_SILENT = ("gradient_checkpointing",)  # transformers reads these entries, although no configuration has them.
_CHOICES = (
    "attn_implementation",
    "experts_implementation",
)  # A configuration keeps these entries, and leaves them out of its JSON.
_SHOWN = 6  # A message lists at most so many names.


def opened(
    module: Any, params: Mapping[str, Any], *, seed: int, in_place: bool = False, complete: bool = False
) -> dict[str, Any] | None:
    """Returns the fields of a `Recipe` for a configuration or a folder; `None` for any other module.

    Args:
        module: A configuration, the path of a folder, or anything else.
        params: Values that replace entries of the configuration.
        seed: The seed for weights that the folder lacks.
        in_place: Whether each worker reads the folder itself; then nothing is read here but the configuration.
        complete: Whether a folder that lacks weights is refused.

    Raises:
        ModuleError: The folder holds no model, or the configuration does not name the class of the model.
    """
    if is_config(module):
        return _recipe_fields(_class_of(module), _with_params(module, params))
    if not is_folder(module):
        return None
    folder = os.path.abspath(module)
    config = config_in(folder)
    if in_place:
        config = _with_params(config, params)
        if not is_weights_folder(folder):
            hint = "write them with save_pretrained(folder), or leave modelDir out"
            raise ModuleError(
                f"{folder} holds no weights as safetensors", hint=hint, param="module", code="ST-MODEL-FOLDER"
            )
        return {**_recipe_fields(_class_of(config), config), "initial": WeightsFolder(folder)}
    fields, weights, lacking = _read(folder, json.dumps(dict(params), sort_keys=True), seed, stamp(folder))
    if complete and lacking:
        hint = "train it first: the values would be random"
        raise ModuleError(
            f"{folder} has no values for {', '.join(lacking)}", hint=hint, param="module", code="ST-MODEL-FOLDER"
        )
    return {**fields, "initial": weights}


def rebuildable(module: Any) -> dict[str, Any] | None:
    """Returns the fields of a `Recipe` that build an instance of a transformers model again; `None` if none can.

    A user may have changed the instance: if its class and configuration build another module, this returns `None`.
    """
    if not is_model(module) or import_path(type(module)) is None:
        return None
    config = _of_dtype(copy.deepcopy(module.config), module.dtype)
    try:
        with torch.device("meta"):
            again = type(module)(copy.deepcopy(config))
    except Exception:  # The class needs more than a configuration.
        return None
    is_same = _shapes(module) == _shapes(again) and repr(module) == repr(again)
    return _recipe_fields(type(module), config) if is_same else None


def _shapes(model: Any) -> dict[str, torch.Size]:
    """Returns the shapes of a model's parameters and buffers by name."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def config_in(folder: str) -> Any:
    """Returns the configuration in a folder; a `ModuleError` says that there is none, or that it cannot be read."""
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

    Any step of a training changes such vectors. Returns `False` if the folder has no safetensors, or no vectors.
    """
    return is_weights_folder(folder) and _are_new(folder, stamp(folder))


@functools.lru_cache(maxsize=4)
def _are_new(folder: str, _: tuple[tuple[str, int], ...]) -> bool:
    weights = WeightsFolder(folder)
    vectors = [tensor for tensor in map(weights.__getitem__, weights) if tensor.dim() == 1 and len(tensor)]
    new = [vector for vector in vectors if torch.all(vector == vector[0]) and vector[0] in (0, 1)]
    return 2 * len(new) > len(vectors)


def classifier_in(folder: str, auto: str, classes: int | None) -> dict[str, Any]:
    """Returns the entries of a folder's configuration that make its model a classifier.

    `auto` is the name of a class in transformers that maps configurations to classifiers.
    """
    config = config_in(folder)
    classes_by_config = getattr(transformers(), auto)._model_mapping
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
    files = filter(Path.exists, Path(folder).iterdir())  # This leaves out links that lead nowhere.
    return tuple(sorted((file.name, file.stat().st_mtime_ns) for file in files))


def _untied_error(folder: str, model: Any, one: str, other: str) -> ModuleError:
    """Returns the error for two saved tensors that differ, although they are one parameter of the model."""
    what = f"{one!r} and {other!r} in {folder} differ, and are one parameter of {type(model).__qualname__}"
    hint = "set tie_word_embeddings to false, in config.json or moduleParams; or keep one of them in the folder"
    return ModuleError(what, hint=hint, param="module")


def _recipe_fields(kind: type, config: Any, with_choices: Any = None) -> dict[str, Any]:
    """Returns the import path of a class and the JSON of a configuration, as fields of a `Recipe`.

    If the configuration has lost its `_CHOICES`, they come from the configuration `with_choices`.
    """
    values = json.loads(config.to_json_string(use_diff=False))
    choices = {name: getattr(with_choices or config, f"_{name}_internal", None) for name in _CHOICES}
    values |= {name: choice for name, choice in choices.items() if isinstance(choice, str)}
    return {"module": import_path(kind), "module_params": {"config": values}}


def _class_of(config: Any) -> Any:
    """Returns the class of model that a configuration names."""
    names = config.architectures or ()
    if names and (kind := getattr(transformers(), names[0], None)) is not None:
        return kind
    what = f"the {type(config).__qualname__} names {f'{names[0]!r}, unknown' if names else 'no class of models'}"
    raise ModuleError(what, hint="set its architectures, such as ['BertForSequenceClassification']", param="module")


def _with_params(config: Any, params: Mapping[str, Any], *, within: bool = False) -> Any:
    """Returns a copy of a configuration in float32 with the values in `params`.

    A dict changes the entries of a configuration `within` this one. There, the `_CHOICES` are refused: they hold for
    the whole model, and the JSON of an inner configuration loses them.
    """
    changed = _of_dtype(copy.deepcopy(config), torch.float32)
    kind = type(config).__qualname__
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
        entry = _with_params(below, value, within=True) if is_config(below) and isinstance(value, Mapping) else value
        with refusing(f"{name} of {kind} cannot be {value!r}", param="moduleParams"):
            setattr(changed, name, entry)
    return changed


def _of_dtype(config: Any, dtype: torch.dtype) -> Any:
    """Sets the dtype of a configuration and of the configurations in it; returns the configuration.

    transformers makes the models within a model by the inner configurations.
    """
    config.dtype = dtype
    for below in filter(is_config, vars(config).values()):
        _of_dtype(below, dtype)
    return config


@functools.lru_cache(maxsize=1)  # All trials of a search share one copy of the weights.
def _read(
    folder: str, params: str, seed: int, _: tuple[tuple[str, int], ...]
) -> tuple[dict[str, Any], bytes, tuple[str, ...]]:
    """Returns the fields of a `Recipe` for a folder, its weights, and the names of the weights that it lacks.

    `params` is JSON, so that it can be a key of the cache; the last argument is the folder's `stamp`.
    """
    changed = json.loads(params)
    other_head = not changed.keys().isdisjoint({"num_labels", "id2label"})
    options = {
        "dtype": torch.float32,
        "local_files_only": True,
        "ignore_mismatched_sizes": other_head,
        "output_loading_info": True,
    }
    hint = "to train from new weights, pass its configuration: transformers.AutoConfig.from_pretrained(folder)"
    with refusing(f"the model in {folder} cannot be read", hint, param="module"), torch.random.fork_rng(devices=()):
        config = _with_params(config_in(folder), changed)
        kind = _class_of(config)
        torch.manual_seed(seed)
        model, info = kind.from_pretrained(folder, config=config, **options)
    for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(one) is not model.get_parameter_or_buffer(other):
            raise _untied_error(folder, model, other, one)
    # The values are set once more: transformers removes entries such as `_SILENT` from the model's configuration.
    lacking = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    return (
        _recipe_fields(kind, _with_params(model.config, changed), config),
        pack_state(model.state_dict()),
        tuple(lacking),
    )


@dataclass
class _Source:
    """How a parameter is made from saved tensors.

    Attributes:
        name: The name of the parameter; if the rule makes several parameters, the name of the first one.
        dtype: The dtype of the parameter.
        rule: The rule of transformers that converts the tensors; `None` if one saved tensor is the parameter.
        tensors: For each saved tensor, the pattern in the rule that asks for it, and its name in the folder.
    """

    name: str
    dtype: torch.dtype
    rule: Any = None
    tensors: list[tuple[str, str]] = field(default_factory=list)


class ConvertedWeights(PartialWeights):
    """A model's parameters and buffers by name, as far as a folder has them; each is made when it is asked for.

    Attributes:
        unknown: The names of weights that the folder has and the model has not, as transformers' rules rename them.
    """

    def __init__(self, model: Any, saved: WeightsFolder) -> None:
        """Takes a transformers model, which may be on the "meta" device, and the saved weights."""
        self._model = model
        self._saved = saved
        kind = type(model).__qualname__
        if getattr(model.config, "quantization_config", None) is not None:
            raise self._wrong("are quantized", "leave modelDir out, or give a folder with weights that are not")
        self.unknown: list[str] = []
        wanted = model.state_dict()
        self._sources = self._match(wanted)
        other_head = self._shapes_of_other_head()
        for name in list(self._sources):
            shape = self._make(name, "meta").shape
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
                raise _untied_error(saved.path, model, other, name)

    def _wrong(self, what: str, hint: str) -> ModuleError:
        return ModuleError(f"the weights in {self._saved.path} {what}", hint=hint, param="module")

    def _shapes_of_other_head(self) -> dict[str, torch.Size]:
        """Returns the shapes of the model with the number of labels in the folder, if the model has another number.

        Saved weights with such a shape belong to another head, and are left out.
        """
        labels = config_in(self._saved.path).num_labels
        config = copy.deepcopy(self._model.config)
        if labels == config.num_labels:
            return {}
        config.num_labels = labels
        with torch.device("meta"):
            return _shapes(type(self._model)(config))

    def _match(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, _Source]:
        """Returns the source of each parameter that the folder has, as transformers matches them."""
        loading: Any = import_module("transformers.core_model_loading")
        rules = import_module("transformers.conversion_mapping").get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix = self._model.base_model_prefix
        sources = dict[str, _Source]()
        for key in sorted(self._saved, key=loading.dot_natural_key):  # Some rules depend on the order.
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = loading.rename_source_key(key, [], [], prefix, wanted)
            if name not in wanted:
                self.unknown.append(name)
                continue
            source = sources.setdefault(name, _Source(name, wanted[name].dtype, by_pattern.get(pattern)))
            source.tensors.append((pattern or key, key))
        for source in [source for source in sources.values() if source.rule is not None]:
            for name in self._convert(source, "meta"):  # A rule may make several parameters.
                sources.setdefault(name, source)
        return {name: source for name, source in sources.items() if name in wanted}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns a parameter, on the CPU."""
        return self._make(name, "cpu")

    def __contains__(self, name: object) -> bool:
        """Whether the folder has a parameter; reads nothing."""
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the parameters."""
        return iter(self._sources)

    def __len__(self) -> int:
        """Returns the number of parameters."""
        return len(self._sources)

    def _make(self, name: str, device: str) -> torch.Tensor:
        """Returns a parameter on a device; on "meta", it has a shape and no values."""
        source = self._sources[name]
        if source.rule is None:
            return self._read(source.tensors[0][1], device, source.dtype)
        return self._convert(source, device)[name]

    def _convert(self, source: _Source, device: str) -> dict[str, torch.Tensor]:
        """Returns the parameters that a rule makes, by name; a `ModuleError` says that tensors are lacking."""
        rule = copy.deepcopy(source.rule)
        for pattern, key in source.tensors:
            rule.add_tensor(source.name, key, pattern, functools.partial(self._read, key, device, source.dtype))
        what = f"the weights in {self._saved.path} lack tensors of {source.name!r}, or have some of other shapes"
        hint = "the folder must have all the files and tensors that save_pretrained wrote"
        with refusing(what, hint, param="module"):
            made = rule.convert(source.name, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _read(self, key: str, device: str, dtype: torch.dtype) -> torch.Tensor:
        return self._saved[key].to(device, dtype)

    def log_differences(self, built: Deferred) -> None:
        """Logs the weights that only the model or only the folder has, but for those that transformers ignores."""
        differences = SimpleNamespace(missing_keys=set(built.lacking), unexpected_keys=set(self.unknown))
        self._model._adjust_missing_and_unexpected_keys(differences)
        if lacking := [name for name in built.lacking if name in differences.missing_keys]:
            _log.warning("new in the model, as the folder has no values for them: %s", _listed(lacking))
        if unknown := [name for name in self.unknown if name in differences.unexpected_keys]:
            _log.warning("in the folder, and not in the model: %s", _listed(unknown))


def _listed(names: list[str]) -> str:
    text = ", ".join(names[:_SHOWN])
    return text if len(names) <= _SHOWN else f"{text} and {len(names) - _SHOWN} more"
