"""Models of transformers from folders and configurations, as fields of a `Recipe`, and back into a folder."""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparktorch.base.imports import import_path, transformers
from sparktorch.base.state_dict import pack_state
from sparktorch.base.weights_folder import WeightsFolder, is_weights_folder
from sparktorch.errors import ModuleError, PersistenceError, nearest, refusing
from sparktorch.train.huggingface.models import is_config, is_folder, is_model, model_in

__all__ = ["classifier_in", "config_in", "opened", "rebuildable", "stamp", "untied", "written"]

_SILENT = ("gradient_checkpointing",)  # entries that transformers reads and no configuration has
_CHOICES = ("attn_implementation", "experts_implementation")  # which a configuration keeps, and leaves out of its JSON


def opened(
    module: Any, params: Mapping[str, Any], *, seed: int, in_place: bool = False, complete: bool = False
) -> dict[str, Any] | None:
    """Returns the fields of a `Recipe` for a configuration or a folder; `None` for any other module.

    `params` replace entries of the configuration; `seed` draws the weights that the folder lacks, unless each worker
    reads it `in_place`. If it is to be `complete`, none may be lacking.

    Raises:
        ModuleError: The folder holds no model, or the configuration does not say of which class.
        ConfigError: transformers is not installed.
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
    found, weights, lacking = _read(folder, json.dumps(dict(params), sort_keys=True), seed, stamp(folder))
    if complete and lacking:
        hint = "train it first: the values would be random"
        raise ModuleError(
            f"{folder} has no values for {', '.join(lacking)}", hint=hint, param="module", code="ST-MODEL-FOLDER"
        )
    return {**found, "initial": weights}


def rebuildable(module: Any) -> dict[str, Any] | None:
    """Returns the fields of a `Recipe` that make a module like an instance of a transformers model, or `None`.

    The user may have changed the instance; then its class and configuration make another.
    """
    if not is_model(module) or import_path(type(module)) is None:
        return None
    config = _of_dtype(copy.deepcopy(module.config), module.dtype)
    try:
        with torch.device("meta"):
            again = type(module)(copy.deepcopy(config))
    except Exception:
        return None
    one, other = ({name: tensor.shape for name, tensor in each.state_dict().items()} for each in (module, again))
    return _described(type(module), config) if one == other and repr(module) == repr(again) else None


def config_in(folder: str) -> Any:
    """Returns the configuration in a folder.

    Raises:
        ModuleError: There is none, or none that this version of transformers reads.
    """
    if not (Path(folder) / "config.json").is_file():
        hint = "give the path of a folder that save_pretrained wrote, on this machine"
        raise ModuleError(
            f"{folder} holds no model: there is no config.json", hint=hint, param="module", code="ST-MODEL-FOLDER"
        )
    hint = "give a folder that save_pretrained wrote, with no later version of transformers than that here"
    with refusing(f"the config.json in {folder} cannot be read", hint, param="module"):
        return transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def classifier_in(folder: str, auto: str, classes: int | None) -> dict[str, Any]:
    """Returns the entries of a folder's configuration that make its model a classifier, one that `auto` names.

    Raises:
        ModuleError: There is no configuration, or no such classifier.
    """
    config, known = config_in(folder), getattr(transformers(), auto)._model_mapping
    if type(config) not in known:
        raise ModuleError(
            f"{auto} knows no {config.model_type}",
            hint="use TorchClassifier",
            param="modelFolder",
            code="ST-MODEL-FOLDER",
        )
    more = {} if classes in (None, config.num_labels) else {"num_labels": classes}
    return {"architectures": [known[type(config)].__name__], "problem_type": "single_label_classification", **more}


def written(module: Any, folder: str, labels: Sequence[str], beside: Any = None) -> None:
    """Writes a model, with a tokenizer or image processor `beside` it, as a folder that transformers opens.

    Of adapters, it writes what `peft` does: their weights and configuration, without the base.

    Raises:
        PersistenceError: The path is that of a file, of which transformers only writes a line into the log.
        AttributeError: The module is no model of transformers, and has no `save_pretrained`.
    """
    model = model_in(module)
    if Path(folder).is_file():
        raise PersistenceError(f"{folder} is a file", hint="name a folder, which is made if it is missing")
    if labels and model is not None:
        model.config.id2label = dict(enumerate(labels))
        model.config.label2id = {label: number for number, label in enumerate(labels)}
    module.save_pretrained(folder)
    if beside is not None:
        beside.save_pretrained(folder)


def stamp(folder: str) -> tuple[tuple[str, int], ...]:
    """Returns the files in a folder and when they were written, as the key of what was read from them."""
    files = filter(Path.exists, Path(folder).iterdir())  # not links that lead nowhere
    return tuple(sorted((file.name, file.stat().st_mtime_ns) for file in files))


def untied(folder: str, model: Any, one: str, other: str) -> ModuleError:
    """Returns the error for two values of one parameter, which transformers would not tie, and its module does."""
    what = f"{one!r} and {other!r} in {folder} differ, and are one parameter of {type(model).__qualname__}"
    hint = "set tie_word_embeddings to false, in config.json or moduleParams; or keep one of them in the folder"
    return ModuleError(what, hint=hint, param="module")


def _described(kind: type, config: Any, chosen: Any = None) -> dict[str, Any]:
    """Returns an import path and JSON of a class and a configuration; `chosen` has its choices if it has lost them."""
    found = json.loads(config.to_json_string(use_diff=False))
    choices = {name: getattr(chosen or config, f"_{name}_internal", None) for name in _CHOICES}
    found |= {name: choice for name, choice in choices.items() if isinstance(choice, str)}
    return {"module": import_path(kind), "module_params": {"config": found}}


def _class_of(config: Any) -> Any:
    """Returns the class of model that a configuration names."""
    names = config.architectures or ()
    if names and (kind := getattr(transformers(), names[0], None)) is not None:
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
        made = _changed(below, value, within=True) if is_config(below) and isinstance(value, Mapping) else value
        with refusing(f"{name} of {kind} cannot be {value!r}", param="moduleParams"):
            setattr(changed, name, made)
    return changed


def _of_dtype(config: Any, dtype: torch.dtype) -> Any:
    """Sets the dtype of a configuration and of those in it, by which transformers makes the models within a model."""
    config.dtype = dtype
    for below in filter(is_config, vars(config).values()):
        _of_dtype(below, dtype)
    return config


@functools.lru_cache(maxsize=1)  # the settings of a search share one copy of the weights
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
    for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(one) is not model.get_parameter_or_buffer(other):
            raise untied(folder, model, other, one)
    # transformers removes an entry that no configuration has from the one that it has made the model with.
    lacking = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    return (
        _described(kind, _changed(model.config, changed), config),
        pack_state(model.state_dict()),
        (*sorted(lacking),),
    )
