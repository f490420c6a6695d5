"""Models of Hugging Face's transformers: made from configs and folders, called by name, trained with their own loss.

The package is imported where a model of it is made; elsewhere, its classes are known by the name of their module.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import IGNORED, Batch
from sparktorch.base.folders import stamp
from sparktorch.base.imports import import_path, load_object
from sparktorch.base.optional import transformers
from sparktorch.base.state_dict import pack_state
from sparktorch.base.weights_folder import WeightsFolder, is_weights_folder
from sparktorch.errors import ModuleError, SparkTorchError, nearest
from sparktorch.train.recipe.loss import TrainingStep

__all__ = [
    "MODEL_LOSS",
    "ModelLossStep",
    "arguments_of",
    "call",
    "check_model_loss",
    "classifier_in",
    "config_in",
    "gets_row_labels",
    "has_own_loss",
    "is_config",
    "is_model",
    "model_in",
    "model_loss",
    "opened",
    "rebuildable",
    "untied",
    "with_config",
]

_SILENT = ("gradient_checkpointing",)  # entries that transformers reads and no configuration has

MODEL_LOSS = f"{__name__}:model_loss"

_PER_ROW = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification")
# By how many tokens the labels are ahead of the logits; transformers takes an unknown kind for that of a causal model.
_PER_TOKEN = {"ForCausalLM": 1, None: 1, "ForMaskedLM": 0, "ForTokenClassification": 0}


def is_model(value: Any) -> bool:
    """Whether a value is a model of transformers, or the class of one."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, nn.Module) and _of_transformers(kind) and hasattr(kind, "from_pretrained")


def model_in(module: Any) -> Any:
    """Returns the model of transformers that a module is, or has adapters on (a `PeftModel`); `None` for any other."""
    below = getattr(module, "get_base_model", None)
    found = below() if callable(below) else module
    return found if is_model(found) else None


def is_config(value: Any) -> bool:
    """Whether a value is the configuration of a transformers model, or the class of one."""
    kind = value if isinstance(value, type) else type(value)
    return _of_transformers(kind) and hasattr(kind, "model_type") and hasattr(kind, "from_dict")


def is_folder(value: Any) -> bool:
    """Whether a value is a path of a folder, and no import path."""
    return isinstance(value, os.PathLike) or (isinstance(value, str) and (os.sep in value or Path(value).is_dir()))


def _of_transformers(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "transformers" for base in kind.__mro__)


def call(module: Any, inputs: Sequence[torch.Tensor], names: Sequence[str], plain: nn.Module | None = None) -> Any:
    """Calls a module: a model of transformers by the names of its arguments, any other by their order.

    Args:
        module: The module.
        inputs: Its arguments.
        names: Their names, as in `Batch.names`.
        plain: The module as the user made it; by default it is `module`.

    Raises:
        ModuleError: The model takes no arguments of these names.
    """
    named = _keywords(_kind(module if plain is None else plain), tuple(names))
    return module(**dict(zip(named, inputs, strict=True))) if named else module(*inputs)


def arguments(batch: Batch, plain: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with which `call` calls a module for a batch."""
    found: tuple[tuple[Any, ...], dict[str, Any]] = call(
        lambda *args, **kwargs: (args, kwargs), batch.inputs, batch.names, plain
    )
    return found


def _kind(module: Any) -> Any:
    return type(model_in(module) or module)


@functools.lru_cache
def _keywords(kind: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names under which a module takes its arguments; `()` if it takes them by their order."""
    if not is_model(kind):
        return ()
    known = _arguments(kind)
    unknown = [name for name in names if name not in known]
    if not unknown:
        return names
    if len(names) == 1:  # a column may have any name
        return (getattr(kind, "main_input_name", known[0]),)
    raise ModuleError(
        f"forward of {kind.__qualname__} has no argument {unknown[0]!r}",
        hint=f"name the input columns, or what preprocess returns, as its arguments: {', '.join(known)}",
        param="module",
    )


def model_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    """The training step of a model that has a loss of its own: one loss per row, or their mean.

    A classifier or regressor of rows gets the labels and returns the mean over rows. The loss of a model of tokens is a
    mean over tokens, which the rows of other ranks would have to be known for: here it is one loss per row, the mean
    over those of its tokens that have a label.
    """
    plain = _unwrapped(module)
    inputs = dict(zip(_keywords(_kind(plain), batch.names), batch.inputs, strict=True))
    made = inputs.pop("labels", None)
    kind = getattr(plain, "loss_type", None)
    if kind in _PER_ROW:
        label = made if batch.label is None else batch.label
        if label is None or (made is not None and batch.label is not None):
            raise _no_loss(plain, f"{'no' if label is None else 'two'} labels", "set labelCol, or return 'labels'")
        loss: torch.Tensor = module(**inputs, labels=_row_labels(plain, label)).loss
        return loss
    if kind not in _PER_TOKEN:
        raise _no_loss(plain, f"a loss of the kind {kind}", "set loss or trainingStep")
    if made is None or batch.label is not None:
        raise _no_loss(plain, "no labels of tokens", "set labelCol='', and return 'labels' from preprocess")
    return _token_losses(module(**inputs).logits, made, ahead=_PER_TOKEN[kind])


class ModelLossStep(TrainingStep):
    """`model_loss` as training step, which no Param names."""

    param, rowwise = "loss", "set loss, such as 'CrossEntropyLoss', or trainingStep: the rows have weights"

    def __init__(self) -> None:
        super().__init__(model_loss)
        self.what = "the model's own loss"


def _unwrapped(module: Any) -> Any:
    while (found := model_in(module)) is None:
        module = module.module
    return found


def _no_loss(plain: nn.Module, what: str, hint: str) -> ModuleError:
    return ModuleError(
        f"{type(plain).__qualname__} has {what}",
        hint=f"{hint}: the model's own loss is used where neither loss nor trainingStep is set",
        param="loss",
    )


def gets_row_labels(module: nn.Module) -> bool:
    """Whether `model_loss` passes labels to a model, which returns the mean loss of its rows."""
    return getattr(_unwrapped(module), "loss_type", None) in _PER_ROW


def _row_labels(plain: Any, label: torch.Tensor) -> torch.Tensor:
    """Returns labels of the dtype by which transformers tells classes from values."""
    single = plain.config.num_labels > 1 and plain.config.problem_type in (None, "single_label_classification")
    return label.long() if single and label.dim() == 1 else label.float()


def _token_losses(logits: torch.Tensor, labels: torch.Tensor, *, ahead: int) -> torch.Tensor:
    """Returns the mean loss of each row over its tokens that have a label; 0 for a row without any."""
    virtual = logits.shape[1] - labels.shape[1]  # tokens that an adapter puts in front
    labels = nn.functional.pad(labels, (virtual, 0), value=IGNORED)
    logits, labels = logits[:, : logits.shape[1] - ahead].float(), labels[:, ahead:].long()
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


@torch.no_grad()
def check_model_loss(module: nn.Module, batch: Batch) -> None:
    """Compares the loss of the training step on equal rows with the loss that the model returns itself.

    Raises:
        ModuleError: They differ.
    """
    names = _keywords(_kind(module), batch.names)
    if "labels" not in names:  # then the step has returned the model's own
        return
    own = float(module(**dict(zip(names, batch.inputs, strict=True))).loss)
    step = float(model_loss(module, batch).mean())
    if math.isfinite(own) and abs(own - step) > 1e-4 * max(1.0, abs(own)):
        raise ModuleError(
            f"the loss of {type(module).__qualname__} is no mean over tokens with a label: {own:.6g}, not {step:.6g}",
            hint="set trainingStep to a function (module, batch) that returns one loss per row",
            param="loss",
        )


def has_own_loss(module: Any) -> bool:
    """Whether what a user gave as module is known to make a model of transformers, without making it."""
    module = getattr(getattr(module, "trained", None), "source", module)  # of a fitted model
    if isinstance(module, str) and ":" in module and not is_folder(module):
        module = load_object(module)
    return is_folder(module) or is_config(module) or is_model(module) or model_in(module) is not None


def with_config(factory: Any, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments of a module's factory; of a model of transformers, `config` as its configuration."""
    if not is_model(factory) or not isinstance(params.get("config"), Mapping):
        return params
    return {**params, "config": factory.config_class.from_dict(dict(params["config"]))}


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


def described(kind: type, config: Any) -> dict[str, Any]:
    """Returns the fields of a `Recipe` that make a model of a class and a configuration: an import path and JSON."""
    return {"module": import_path(kind), "module_params": {"config": json.loads(config.to_json_string(use_diff=False))}}


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
        ModuleError: There is none.
        ConfigError: transformers is not installed.
    """
    _stamp(folder)
    return transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


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


def arguments_of(name: str) -> tuple[str, ...]:
    """Returns the names of the arguments of a class in transformers."""
    return _arguments(getattr(transformers(), name))


def _arguments(kind: Any) -> tuple[str, ...]:
    parameters = inspect.signature(kind.forward).parameters
    return tuple(name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD)[1:]


def rebuildable(module: Any) -> dict[str, Any] | None:
    """Returns the fields of a `Recipe` that make a module like an instance of a transformers model, or `None`.

    The user may have changed the instance; then its class and configuration make another.
    """
    if not is_model(module) or import_path(type(module)) is None:
        return None
    try:
        with torch.device("meta"):
            again = type(module)(copy.deepcopy(module.config))
    except Exception:
        return None
    one, other = ({name: tensor.shape for name, tensor in each.state_dict().items()} for each in (module, again))
    return described(type(module), module.config) if one == other and repr(module) == repr(again) else None


def _changed(config: Any, params: Mapping[str, Any]) -> Any:
    """Returns a copy of a configuration with other values; dicts change entries of configurations in it.

    Raises:
        ModuleError: It has no entry of a name.
    """
    changed = copy.deepcopy(config)
    for name, value in params.items():
        if not hasattr(changed, name) and name not in _SILENT:
            raise ModuleError(
                f"the {type(config).__qualname__} has no entry {name!r}",
                hint=nearest(name, {"num_labels", *changed.to_dict()}),
                param="moduleParams",
            )
        below = getattr(changed, name)
        setattr(changed, name, _changed(below, value) if is_config(below) and isinstance(value, Mapping) else value)
    return changed


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
    return described(kind, model.config), pack_state(model.state_dict())


def untied(folder: str, model: Any, one: str, other: str) -> ModuleError:
    """Returns the error for a folder that has two values for what its configuration makes one parameter.

    transformers would warn and not tie them; the module that is built of the configuration alone would.
    """
    return ModuleError(
        f"{one!r} and {other!r} in {folder} differ, and are one parameter of {type(model).__qualname__}",
        hint="set tie_word_embeddings to false, in config.json or moduleParams; or keep one of them in the folder",
        param="module",
    )
