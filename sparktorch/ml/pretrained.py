"""Classifiers of text and images that go on from a local folder of Hugging Face's."""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import replace
from typing import Any

from sparktorch.base.config import at_least
from sparktorch.base.imports import transformers
from sparktorch.errors import ConfigError, ModuleError, Refusal, refuse
from sparktorch.ml.classification import TorchClassificationModel, TorchClassifier
from sparktorch.ml.fit.values import Values, not_set
from sparktorch.ml.params.mixins import (
    ImageClassificationModelParams,
    ImageClassifierParams,
    TextClassificationModelParams,
    TextClassifierParams,
)
from sparktorch.ml.tasks.automatic import IMAGES, TEXTS
from sparktorch.ml.tasks.automatic_estimator import AutomaticEstimator
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.huggingface.folder import classifier_in, config_in
from sparktorch.train.huggingface.models import names_of_arguments
from sparktorch.train.huggingface.preprocess import FromFolder, Pixels, Tokens

__all__ = [
    "ImageClassificationModel",
    "ImageClassifier",
    "TextClassificationModel",
    "TextClassifier",
]

_REFUSED = (
    *(
        Refusal(
            name,
            lambda p, name=name: (
                p.is_set(name) and (name == "inputCols" or not isinstance(p["preprocess"], FromFolder))
            ),  # type: ignore[misc]
            f"{name} is set, which the estimator finds in modelFolder",
            "leave it out, or use TorchClassifier",
        )
        for name in ("module", "moduleParams", "preprocess", "inputCols")
    ),
    Refusal(
        "nullPolicy",
        lambda p: p["nullPolicy"] == "fill",
        "nullPolicy is 'fill', and fillValue stands for no text and for no image",
        "'drop' leaves out rows without one; or replace them before fit",
    ),
    not_set("modelFolder", "pass the path of a local folder"),
)


class _OneColumn:
    """Has `textCol` or `imageCol` in place of `featuresCol`."""

    def getFeaturesCol(self) -> str:
        """Gets the value of `textCol`, or of `imageCol`."""
        name: str = self.getOrDefault("textCol" if self.hasParam("textCol") else "imageCol")  # type: ignore[attr-defined]
        return name


class _FromFolderModel(_OneColumn, TorchClassificationModel):
    """A classifier that reads its tokenizer or image processor from `modelFolder`."""

    _holder = "modelFolder"

    @property
    def trained(self) -> TrainedModule:
        """The trained module, whose `preprocess` reads `modelFolder`."""
        found, folder = super().trained, str(self.getOrDefault("modelFolder"))
        if not isinstance(found.preprocess, FromFolder) or found.preprocess.folder == folder:
            return found
        return replace(found, preprocess=replace(found.preprocess, folder=folder))


class _FromFolderClassifier(_OneColumn, AutomaticEstimator, TorchClassifier):
    """What both classifiers share."""

    _auto: str

    def completed(self) -> Any:
        """Returns a copy with the Params that follow from the folder: module, its parameters, and preprocess.

        Raises:
            ConfigError: `modelFolder` is not set, or a Param is set that it replaces.
            ModuleError: There is no such folder, or no model in it.
        """
        refuse(_REFUSED, Values(self))
        folder = os.path.abspath(str(self.getOrDefault("modelFolder")))
        classes = self.getOrDefault("numLabels") if self.isDefined("numLabels") else None
        if classes is not None:
            at_least("numLabels", classes, 2)
        params = classifier_in(folder, self._auto, classes)
        made = self._preprocess_of(folder, params)
        return super().completed().copy()._set(modelFolder=folder, module=folder, moduleParams=params, preprocess=made)

    @abstractmethod
    def _preprocess_of(self, folder: str, params: dict[str, Any]) -> FromFolder:
        """Returns the preprocess of a folder, to whose configuration it may add entries."""


class TextClassificationModel(_FromFolderModel, TextClassificationModelParams):
    """A classifier fitted by `TextClassifier`: `textCol` in, what `TorchClassificationModel` adds out."""

    _estimator = "sparktorch.ml.pretrained:TextClassifier"


class TextClassifier(_FromFolderClassifier, TextClassifierParams):
    """Trains a classifier of text from a local folder with a model and a tokenizer of Hugging Face's.

    The folder is at the same path on the driver and in each rank. A model without a head for classes gets a new one.

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _model_class = TextClassificationModel
    _task_settings = TEXTS
    _searched_rates = (0.4, 2.0)
    _auto = "AutoModelForSequenceClassification"

    def _preprocess_of(self, folder: str, params: dict[str, Any]) -> FromFolder:
        length, config = self.getMaxLength(), config_in(folder)
        model = getattr(transformers(), params["architectures"][0])
        at_least("maxLength", length, 1)
        tokens = Tokens(folder, max_length=length, arguments=names_of_arguments(model))
        tokenizer = tokens.load()
        what = ""
        if tokenizer.pad_token_id is None:
            what = "has no padding token, which rows of several lengths need"
            hint = "set tokenizer.pad_token, such as tokenizer.eos_token, and save it in the folder"
        elif (size := getattr(config, "vocab_size", None)) is not None and len(tokenizer) > size:
            what = f"knows {len(tokenizer)} tokens, and the model {size}"
            hint = "are they of one model? model.resize_token_embeddings(len(tokenizer)) makes room, then save both"
        if what:
            raise ModuleError(f"the tokenizer in {folder} {what}", hint=hint, param="modelFolder")
        if getattr(config, "pad_token_id", 0) is None:
            params["pad_token_id"] = tokenizer.pad_token_id
        positions = getattr(config, "max_position_embeddings", None)
        most = min(positions, tokenizer.model_max_length) if positions else length
        if not self.isSet("maxLength"):
            return replace(tokens, max_length=min(length, most))
        if length > most:
            what = f"maxLength is {length}, and the model and its tokenizer take {most} tokens at most"
            raise ConfigError(what, hint=f"set maxLength to {most} or less", param="maxLength")
        return tokens


class ImageClassificationModel(_FromFolderModel, ImageClassificationModelParams):
    """A classifier fitted by `ImageClassifier`: `imageCol` in, what `TorchClassificationModel` adds out."""

    _estimator = "sparktorch.ml.pretrained:ImageClassifier"


class ImageClassifier(_FromFolderClassifier, ImageClassifierParams):
    """Trains a classifier of image files from a local folder with a model and an image processor of Hugging Face's.

    The folder is at the same path on the driver and in each rank. A model without a head for classes gets a new one.

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _model_class = ImageClassificationModel
    _task_settings = IMAGES
    _auto = "AutoModelForImageClassification"

    def _preprocess_of(self, folder: str, params: dict[str, Any]) -> FromFolder:
        Pixels(folder).load()
        return Pixels(folder)
