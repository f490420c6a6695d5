"""Models of transformers from folders and configurations: as fields of a `Recipe`, and as what makes a model again."""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sparktorch.base.folders import stamp
from sparktorch.base.imports import import_path
from sparktorch.base.optional import transformers
from sparktorch.base.state_dict import pack_state
from sparktorch.base.weights_folder import WeightsFolder, is_weights_folder
from sparktorch.errors import ModuleError, SparkTorchError, nearest
from sparktorch.train.recipe.huggingface import is_config, is_folder, is_model

__all__ = ["classifier_in", "config_in", "opened", "rebuildable", "untied"]

_SILENT = ("gradient_checkpointing",)  # entries that transformers reads and no configuration has
_CHOICES = ("attn_implementation", "experts_implementation")  # which a configuration keeps, and leaves out of its JSON


def opened(module: Any, params: Mapping[str, Any], *, seed: int, in_place: bool = False) -> dict[str, Any] | None:
    """Returns the fields of a `Recipe` for a configuration or a folder; `None` for any other module.

    Args:
        module: What the user gave.
        params: Replaces entries of the configuration.
        seed: Seed of those weights that the folder lacks.
        in_place: Whether each worker reads the weights in the folder.

    Raises:
        ModuleError: The folder holds no model, or the configuration does not say of which class.
        ConfigError: transformers is not installed.
    """
    if is_folder(module) and in_place:
        folder = os.path.abspath(module)
        config = _changed(config_in(folder), params)
        if not is_weights_folder(folder):
            raise ModuleError(
                f"{folder} holds no weights as safetensors",
                hint="write them with save_pretrained(folder), or leave modelDir out",
                param="module",
            )
        return {**described(type_of(config), config), "initial": WeightsFolder(folder)}
    if is_folder(module):
        found, weights = _read(os.path.abspath(module), json.dumps(dict(params), sort_keys=True), seed, _stamp(module))
        return {**found, "initial": weights}
    return described(type_of(module), _changed(module, params)) if is_config(module) else None


def described(kind: type, config: Any, chosen: Any = None) -> dict[str, Any]:
    """Returns the fields of a `Recipe` that make a model of a class and a configuration: an import path and JSON.

    Args:
        kind: The class.
        config: The configuration.
        chosen: Another one, which says by what attention and experts are computed, if `config` does not.
    """
    found = json.loads(config.to_json_string(use_diff=False))
    choices = {name: getattr(chosen or config, f"_{name}_internal", None) for name in _CHOICES}
    found |= {name: choice for name, choice in choices.items() if isinstance(choice, str)}
    return {"module": import_path(kind), "module_params": {"config": found}}


def type_of(config: Any) -> type:
    """Returns the class of model that a configuration names.

    Raises:
        ModuleError: It names none, or one that transformers does not have.
    """
    names = config.architectures or ()
    kind = getattr(transformers(), names[0], None) if names else None
    if kind is None:
        raise ModuleError(
            f"the {type(config).__qualname__} names {'no class of models' if not names else f'{names[0]!r}, unknown'}",
            hint="set its architectures, such as ['BertForSequenceClassification']",
            param="module",
        )
    found: type = kind
    return found


def config_in(folder: str) -> Any:
    """Returns the configuration in a folder.

    Raises:
        ModuleError: There is none, or none that this version of transformers reads.
        ConfigError: transformers is not installed.
    """
    _stamp(folder)
    known = transformers()
    try:
        return known.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModuleError(
            f"the config.json in {folder} cannot be read: {error}",
            hint="give a folder that save_pretrained wrote, with no later version of transformers than that here",
            param="module",
        ) from error


def classifier_in(folder: str, auto: str, classes: int | None) -> dict[str, Any]:
    """Returns the entries of a folder's configuration that make its model a classifier.

    Args:
        folder: The folder.
        auto: The class in transformers that knows the classifiers, by name.
        classes: Number of classes; `None` for that of the configuration.

    Raises:
        ModuleError: There is no configuration, or no such classifier.
        ConfigError: transformers is not installed.
    """
    config = config_in(folder)
    known = getattr(transformers(), auto)._model_mapping
    if type(config) not in known:
        raise ModuleError(f"{auto} knows no {config.model_type}", hint="use TorchClassifier", param="modelFolder")
    more = {} if classes is None or classes == config.num_labels else {"num_labels": classes}
    return {
        "architectures": [known[type(config)].__name__],
        "problem_type": "single_label_classification",
        **more,
    }


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
    return described(type(module), config) if one == other and repr(module) == repr(again) else None


def _changed(config: Any, params: Mapping[str, Any], *, within: bool = False) -> Any:
    """Returns a copy of a configuration in float32 with other values; dicts change entries of configurations in it.

    Raises:
        ModuleError: It has no entry of a name, or does not take a value; or one `within` another says how attention is
            computed, which is lost where configurations become JSON.
    """
    changed = _of_dtype(copy.deepcopy(config), torch.float32)
    for name, value in params.items():
        if name in _CHOICES and (within or not isinstance(value, str | None)):
            raise ModuleError(
                f"{name} of {type(config).__qualname__} cannot be {value!r}: one choice holds for the whole model",
                hint=f"set moduleParams={{{name!r}: 'eager'}} or another of transformers' names",
                param="moduleParams",
            )
        name = f"_{name}" if name in _CHOICES else name
        if not hasattr(changed, name) and name not in _SILENT:
            raise ModuleError(
                f"the {type(config).__qualname__} has no entry {name!r}",
                hint=nearest(name, {"num_labels", *changed.to_dict()}),
                param="moduleParams",
            )
        below = getattr(changed, name, None)
        made = _changed(below, value, within=True) if is_config(below) and isinstance(value, Mapping) else value
        try:
            setattr(changed, name, made)
        except Exception as error:
            raise ModuleError(
                f"{name} of {type(config).__qualname__} cannot be {value!r}: {error}", param="moduleParams"
            ) from error
    return changed


def _of_dtype(config: Any, dtype: torch.dtype) -> Any:
    """Sets the dtype of a configuration and of those in it, by which transformers makes the models within a model."""
    config.dtype = dtype
    for below in filter(is_config, vars(config).values()):
        _of_dtype(below, dtype)
    return config


def _stamp(folder: Any) -> tuple[tuple[str, int], ...]:
    """Returns the files of a folder, and when they were written."""
    if not (Path(folder) / "config.json").is_file():
        raise ModuleError(
            f"{os.fspath(folder)} holds no model: there is no config.json",
            hint="give the path of a folder that save_pretrained wrote, on this machine",
            param="module",
        )
    return stamp(folder)


@functools.lru_cache(maxsize=1)  # the settings of a search share one copy of the weights
def _read(folder: str, params: str, seed: int, _: tuple[tuple[str, int], ...]) -> tuple[dict[str, Any], bytes]:
    """Reads the configuration and weights of a folder."""
    changed = json.loads(params)
    try:
        config = _changed(config_in(folder), changed)
        kind: Any = type_of(config)
        other_head = {"num_labels", "id2label"} & changed.keys()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model = kind.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                ignore_mismatched_sizes=bool(other_head),
            )
    except SparkTorchError:
        raise
    except Exception as error:
        raise ModuleError(
            f"the model in {folder} cannot be read: {error}",
            hint="to train from new weights, pass its configuration: transformers.AutoConfig.from_pretrained(folder)",
            param="module",
        ) from error
    for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(one) is not model.get_parameter_or_buffer(other):
            raise untied(folder, model, other, one)
    # transformers removes an entry that no configuration has from the one that it has made the model with.
    return described(kind, _changed(model.config, changed), config), pack_state(model.state_dict())


def untied(folder: str, model: Any, one: str, other: str) -> ModuleError:
    """Returns the error for a folder that has two values for what its configuration makes one parameter.

    transformers would warn and not tie them; the module that is built of the configuration alone would.
    """
    return ModuleError(
        f"{one!r} and {other!r} in {folder} differ, and are one parameter of {type(model).__qualname__}",
        hint="set tie_word_embeddings to false, in config.json or moduleParams; or keep one of them in the folder",
        param="module",
    )
