"""Models of transformers, known without importing it: called by name, and trained with their own loss."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import IGNORED, Batch
from sparktorch.base.imports import load_object
from sparktorch.errors import ModuleError

__all__ = [
    *("MODEL_LOSS", "arguments", "call", "check_model_loss", "gets_row_labels", "has_own_loss", "is_config"),
    *("is_folder", "is_model", "model_in", "model_loss", "names_of_arguments", "with_config", "without_caches"),
]

MODEL_LOSS = f"{__name__}:model_loss"

_PER_ROW = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification")
# By how many tokens the labels are ahead of the logits; transformers takes an unknown kind for that of a causal model.
_PER_TOKEN = {"ForCausalLM": 1, None: 1, "ForMaskedLM": 0, "ForTokenClassification": 0}


def is_model(value: Any) -> bool:
    """Whether a value is a model of transformers, or the class of one."""
    kind = _kind(value)
    return _of_transformers(kind) and issubclass(kind, nn.Module) and hasattr(kind, "from_pretrained")


def model_in(module: Any) -> Any:
    """Returns the model of transformers that a module is, or has adapters on (a `PeftModel`); `None` for any other."""
    found = module.get_base_model() if hasattr(type(module), "get_base_model") else module
    return found if is_model(found) else None


def is_config(value: Any) -> bool:
    """Whether a value is the configuration of a transformers model, or the class of one."""
    kind = _kind(value)
    return _of_transformers(kind) and hasattr(kind, "model_type") and hasattr(kind, "from_dict")


def is_folder(value: Any) -> bool:
    """Whether a value is a path of a folder, and no import path."""
    return isinstance(value, os.PathLike) or (isinstance(value, str) and (os.sep in value or Path(value).is_dir()))


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


def call(module: Any, inputs: Sequence[torch.Tensor], names: Sequence[str], plain: nn.Module | None = None) -> Any:
    """Calls a module, `plain` as the user made it: a transformers model by names of arguments, any other by order."""
    plain = module if plain is None else plain
    named = _keywords(_kind(model_in(plain) or plain), tuple(names))
    return module(**dict(zip(named, inputs, strict=True))) if named else module(*inputs)


def arguments(batch: Batch, plain: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with which `call` calls a module for a batch."""
    found: tuple[tuple[Any, ...], dict[str, Any]] = call(
        lambda *args, **kwargs: (args, kwargs), batch.inputs, batch.names, plain
    )
    return found


def names_of_arguments(kind: Any) -> tuple[str, ...]:
    """Returns the names of the arguments of a class of models."""
    parameters = inspect.signature(kind.forward).parameters
    return tuple(name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD)[1:]


def without_caches(module: nn.Module) -> nn.Module:
    """Returns the module; its models of transformers make no caches, which would be one object for all passes."""
    part: Any
    for part in module.modules():
        if getattr(getattr(part, "config", None), "use_cache", False):
            part.config = copy.copy(part.config)  # it may be that of the class
            part.config.use_cache = False
    return module


def _kind(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


@functools.lru_cache
def _of_transformers(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "transformers" for base in kind.__mro__)


@functools.lru_cache
def _keywords(kind: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names under which a module takes its arguments; `()` if it takes them by their order."""
    if not is_model(kind):
        return ()
    known = names_of_arguments(kind)
    unknown = [name for name in names if name not in known]
    if not unknown:
        return names
    if len(names) == 1:  # a column may have any name
        return (getattr(kind, "main_input_name", known[0]),)
    hint = f"name the input columns, or what preprocess returns, as its arguments: {', '.join(known)}"
    raise ModuleError(f"forward of {kind.__qualname__} has no argument {unknown[0]!r}", hint=hint, param="module")


def model_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    """The training step of a model that has a loss of its own: one loss per row, or their mean.

    A classifier or regressor of rows gets the labels and returns the mean over rows. The loss of a model of tokens is a
    mean over tokens, which the rows of other ranks would have to be known for: here it is one loss per row, the mean
    over those of its tokens that have a label.
    """
    plain = _unwrapped(module)
    _, inputs = arguments(batch, plain)
    made, label = inputs.pop("labels", None), batch.label
    kind = getattr(plain, "loss_type", None)
    if kind in _PER_ROW and (made is None) != (label is None):
        loss: torch.Tensor = module(**inputs, labels=_row_labels(plain, made if label is None else label)).loss
        return loss
    if kind in _PER_TOKEN and made is not None and label is None:
        return _token_losses(module(**inputs).logits, made, ahead=_PER_TOKEN[kind])
    what, hint = "no labels of tokens", "set labelCol='', and return 'labels' from preprocess"
    if kind in _PER_ROW:
        what, hint = f"{'no' if label is None else 'two'} labels", "set labelCol, or return 'labels'"
    elif kind not in _PER_TOKEN:
        what, hint = f"a loss of the kind {kind}", "set loss or trainingStep"
    hint += ": the model's own loss is used where neither loss nor trainingStep is set"
    raise ModuleError(f"{type(plain).__qualname__} has {what}", hint=hint, param="loss")


def gets_row_labels(module: nn.Module) -> bool:
    """Whether `model_loss` passes labels to a model, which returns the mean loss of its rows."""
    return getattr(_unwrapped(module), "loss_type", None) in _PER_ROW


@torch.no_grad()
def check_model_loss(module: nn.Module, batch: Batch) -> None:
    """Compares the loss of the training step on equal rows with the loss that the model returns itself."""
    _, inputs = arguments(batch, module)
    if "labels" not in inputs:  # then the step has returned the model's own
        return
    own, step = float(module(**inputs).loss), float(model_loss(module, batch).mean())
    if math.isfinite(own) and abs(own - step) > 1e-4 * max(1.0, abs(own)):
        what = f"the loss of {type(module).__qualname__} is no mean over tokens with a label: {own:.6g}, not {step:.6g}"
        hint = "set trainingStep to a function (module, batch) that returns one loss per row"
        raise ModuleError(what, hint=hint, param="loss")


def _unwrapped(module: Any) -> Any:
    while (found := model_in(module)) is None:
        module = module.module
    return found


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
