"""The loss that a model of transformers has itself, as a training step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from sparktorch.adapters.huggingface.models import model_in
from sparktorch.base.batch import IGNORED, Batch
from sparktorch.errors import ModuleError
from sparktorch.train.recipe.adapter import arguments
from sparktorch.train.recipe.loss import TrainingStep

__all__ = ["ModelLossStep"]

_PER_ROW = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification")
# By how many tokens the labels are ahead of the logits; transformers takes an unknown kind for that of a causal model.
_PER_TOKEN = {"ForCausalLM": 1, None: 1, "ForMaskedLM": 0, "ForTokenClassification": 0}


class ModelLossStep(TrainingStep):
    """The loss that a model has, which is used where a fit names neither a loss nor a training step."""

    param, rowwise = "loss", "set loss, such as 'CrossEntropyLoss', or trainingStep: the rows have weights"
    has_metrics = False

    def __init__(self) -> None:
        super().__init__(_model_loss)
        self.what = "the model's own loss"

    def is_mean(self, module: nn.Module) -> bool:
        """Whether the model gets labels of rows, and returns the mean loss of its rows."""
        return getattr(_unwrapped(module), "loss_type", None) in _PER_ROW

    @torch.no_grad()
    def check(self, module: nn.Module, batch: Batch) -> None:
        """Compares the loss of the training step on equal rows with the loss that the model returns itself."""
        _, inputs = arguments(batch, module)
        if "labels" not in inputs:  # Then the step has returned what the model returned.
            return
        expected, step = float(module(**inputs).loss), float(_model_loss(module, batch).mean())
        if math.isfinite(expected) and abs(expected - step) > 1e-4 * max(1.0, abs(expected)):
            kind = type(module).__qualname__
            what = f"the loss of {kind} is no mean over tokens with a label: {expected:.6g}, not {step:.6g}"
            hint = "set trainingStep to a function (module, batch) that returns one loss per row"
            raise ModuleError(what, hint=hint, param="loss")


def _model_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns one loss per row, or their mean.

    A classifier or regressor of rows gets the labels and returns the mean over rows. The loss of a model of tokens is a
    mean over tokens, which the rows of other ranks would have to be known for: here it is one loss per row, the mean
    over those of its tokens that have a label.
    """
    plain = _unwrapped(module)
    _, inputs = arguments(batch, plain)
    labels, label = inputs.pop("labels", None), batch.label
    kind = getattr(plain, "loss_type", None)
    if kind in _PER_ROW and (labels is None) != (label is None):
        loss: torch.Tensor = module(**inputs, labels=_row_labels(plain, labels if label is None else label)).loss
        return loss
    if kind in _PER_TOKEN and labels is not None and label is None:
        return _token_losses(module(**inputs).logits, labels, ahead=_PER_TOKEN[kind])
    what, hint = "no labels of tokens", "set labelCol='', and return 'labels' from preprocess"
    if kind in _PER_ROW:
        what, hint = f"{'no' if label is None else 'two'} labels", "set labelCol, or return 'labels'"
    elif kind not in _PER_TOKEN:
        what, hint = f"a loss of the kind {kind}", "set loss or trainingStep"
    hint += ": the model's own loss is used where neither loss nor trainingStep is set"
    raise ModuleError(f"{type(plain).__qualname__} has {what}", hint=hint, param="loss")


def _unwrapped(module: Any) -> Any:
    while model_in(module) is None:
        module = module.module
    return model_in(module)


def _row_labels(plain: Any, label: torch.Tensor) -> torch.Tensor:
    """Returns labels of the dtype by which transformers tells classes from values."""
    single = plain.config.num_labels > 1 and plain.config.problem_type in (None, "single_label_classification")
    return label.long() if single and label.dim() == 1 else label.float()


def _token_losses(logits: torch.Tensor, labels: torch.Tensor, *, ahead: int) -> torch.Tensor:
    """Returns the mean loss of each row over its tokens that have a label; 0 for a row without any."""
    virtual = logits.shape[1] - labels.shape[1]  # The tokens that an adapter puts in front have no labels.
    labels = nn.functional.pad(labels, (virtual, 0), value=IGNORED)
    logits, labels = logits[:, : logits.shape[1] - ahead].float(), labels[:, ahead:].long()
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)
