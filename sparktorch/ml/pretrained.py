"""Classifiers of text and images, that go on from a local folder of Hugging Face's; of images, from none as well."""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame

from sparktorch.adapters.huggingface.folder import classifier_in, config_in, has_new_weights
from sparktorch.adapters.huggingface.models import names_of_arguments
from sparktorch.adapters.huggingface.preprocess import FromFolder, Pixels, Tokens
from sparktorch.base.config import at_least
from sparktorch.base.imports import transformers
from sparktorch.data.image_network import ImageNetwork
from sparktorch.errors import ConfigError, ModuleError, Refusal, refuse
from sparktorch.ml.classification import TorchClassificationModel, TorchClassifier
from sparktorch.ml.fit.values import Values, not_set
from sparktorch.ml.params.mixins import (
    ImageClassificationModelParams,
    ImageClassifierParams,
    TextClassificationModelParams,
    TextClassifierParams,
)
from sparktorch.ml.tasks.automatic import IMAGES, NEW_IMAGES, NEW_TEXTS, TEXTS, TaskSettings
from sparktorch.ml.tasks.image_size import usual_size
from sparktorch.ml.tasks.labelled import LabelledEstimator, LearnedOfLabels
from sparktorch.model.trained_module import TrainedModule

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
            lambda p, name=name: p.is_set(name) and (name == "inputCols" or not _is_completed(p)),  # type: ignore[misc]
            f"{name} is set, which the estimator chooses itself",
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
    Refusal(
        "inputShapes",
        lambda p: p.is_set("inputShapes") and p["modelFolder"] is not None,
        "inputShapes is set, and what is in modelFolder says the size of its inputs",
        "leave it out; the folder's preprocessor_config.json has the size",
    ),
)
_UNKNOWN_SIZE = (32, 32)  # The size of images before the first are looked at.
_WITHOUT_FOLDER = (not_set("modelFolder", "pass the path of a local folder"),)


def _is_completed(p: Values) -> bool:
    """Whether the Params that an estimator chooses itself are those that it has chosen."""
    return isinstance(p["preprocess"], FromFolder) or p["module"] is ImageNetwork


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
        trained, folder = super().trained, Values(self)["modelFolder"]
        if not isinstance(trained.preprocess, FromFolder) or trained.preprocess.folder == folder:
            return trained
        return replace(trained, preprocess=replace(trained.preprocess, folder=str(folder)))


class _FromFolderClassifier(_OneColumn, LabelledEstimator, TorchClassifier):
    """What both classifiers share.

    Attributes:
        _trained_settings: The constants for a folder whose weights are trained.
        _new_settings: The constants for weights that are random.
        _auto: The class of transformers' that makes a classifier of a folder.
    """

    _trained_settings: TaskSettings
    _new_settings: TaskSettings
    _auto: str

    @property
    def _task_settings(self) -> TaskSettings:
        folder = Values(self)["modelFolder"]
        return self._new_settings if folder is None or has_new_weights(folder) else self._trained_settings

    def completed(self) -> Any:
        """Returns a copy with the Params that follow from the folder: module, its parameters, and preprocess.

        Raises:
            ConfigError: `modelFolder` is not set, or a Param is set that it replaces.
            ModuleError: There is no such folder, or no model in it.
        """
        refuse((*_REFUSED, *_WITHOUT_FOLDER), Values(self))
        folder = os.path.abspath(str(self.getOrDefault("modelFolder")))
        classes = self._classes
        if not self.isDefined("numLabels"):
            classes = max(classes, getattr(config_in(folder), "num_labels", 2))
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

    The folder is at the same path on the driver and in each rank. A model without a head for classes, or with one for
    fewer than the labels have, gets a new one.

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _model_class = TextClassificationModel
    _trained_settings, _new_settings = TEXTS, NEW_TEXTS
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
    """Trains a classifier of image files.

    It goes on from a local folder with a model and an image processor of Hugging Face's, which is at the same path on
    the driver and in each rank. A model without a head for classes, or with one for fewer than the labels have, gets a
    new one. Without `modelFolder`, it trains a small residual network from random weights, and resizes images to
    `inputShapes`, by default to the usual size of the first ones, and at most 128 pixels a side.

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _model_class = ImageClassificationModel
    _trained_settings, _new_settings = IMAGES, NEW_IMAGES
    _learns_from = (*LabelledEstimator._learns_from, "imageCol", "inputShapes")
    _auto = "AutoModelForImageClassification"

    @property
    def _learns(self) -> bool:
        return super()._learns or not (self.isDefined("modelFolder") or self.isSet("inputShapes"))

    def _learn(self, dataset: DataFrame) -> LearnedOfLabels:
        learned = super()._learn(dataset)
        if self.isDefined("modelFolder") or self.isSet("inputShapes"):
            return learned
        return learned._replace(size=usual_size(dataset, self.getFeaturesCol()))

    def completed(self) -> Any:
        """Returns a copy with the Params that follow from the folder or, without one, from the rows."""
        if self.isDefined("modelFolder"):
            return super().completed()
        refuse(_REFUSED, Values(self))
        column = self.getFeaturesCol()
        if others := {*self.getInputShapes()} - {column}:
            what = f"inputShapes names {min(others)!r}, and the column of images is {column!r}"
            hint = f"set inputShapes={{{column!r}: [channels, height, width]}}, or imageCol"
            raise ConfigError(what, hint=hint, param="inputShapes", code="ST-SHAPE")
        size = self._seen.size if self._seen is not None else None
        shape = self.getInputShapes().get(column, [3, *(size or _UNKNOWN_SIZE)])
        if len(shape) != 3 or shape[0] not in (1, 3, 4):
            what, hint = (
                f"inputShapes[{column!r}] is {list(shape)}",
                "set [channels, height, width], such as [3, 64, 64]",
            )
            raise ConfigError(what, hint=hint, param="inputShapes", code="ST-SHAPE")
        params = {"classes": self._classes or 2, "shape": list(shape)}
        that = LabelledEstimator.completed(self).copy()._set(module=ImageNetwork, moduleParams=params)
        return that._set(inputShapes={column: list(shape)}, inputLayouts={column: "image"})

    def _preprocess_of(self, folder: str, params: dict[str, Any]) -> FromFolder:
        Pixels(folder).load()
        return Pixels(folder)
