"""A classifier of images, from a local folder of Hugging Face's or from random weights, and its model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame

from sparktorch.adapters.huggingface.preprocess import FromFolder, Pixels
from sparktorch.errors import ConfigError
from sparktorch.tasks.images.image_size import usual_size
from sparktorch.tasks.images.network import ImageNetwork
from sparktorch.tasks.images.params import ImageClassificationModelParams, ImageClassifierParams
from sparktorch.tasks.shared.labelled import LabelledEstimator, LearnedOfLabels
from sparktorch.tasks.shared.pretrained import FolderClassifier, FolderModel
from sparktorch.tasks.shared.settings import TaskSettings

__all__ = ["IMAGES", "NEW_IMAGES", "ImageClassificationModel", "ImageClassifier"]

_UNKNOWN_SIZE = (32, 32)  # This stands for the size of images until the first images have been read.
IMAGES = TaskSettings(
    learning_rate=2e-4,
    usual_rate=2e-4,
    scheduler="CosineAnnealingLR",
    warmup=0.1,
    largest_batch=128,
    most_patience=6,
    least_steps=200,
    rows_in_all=50_000,
    least_epochs=3,
    most_epochs=20,
    unwatched_epochs=3,
    least_trained=450,
)
# These are for models whose weights are random.
NEW_IMAGES = replace(
    IMAGES,
    learning_rate=3e-3,
    usual_rate=1e-3,
    least_steps=400,
    rows_in_all=100_000,
    least_epochs=8,
    most_epochs=40,
    unwatched_epochs=8,
)


class ImageClassificationModel(FolderModel, ImageClassificationModelParams):
    """A classifier fitted by `ImageClassifier`. It reads `imageCol` and adds what `TorchClassificationModel` adds."""

    _estimator = "sparktorch.tasks.images.estimator:ImageClassifier"


class ImageClassifier(FolderClassifier, ImageClassifierParams):
    """Trains a classifier of image files.

    It goes on from a local folder with a model and an image processor of Hugging Face's, which is at the same path on
    the driver and in each rank. A model without a head for classes, or with a head for fewer classes than the labels
    have, gets a new head. Without `modelFolder`, it trains a small residual network from random weights. It then
    resizes images to `inputShapes`, by default to the usual size of the first images, with at most 128 pixels a side.

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _model_class = ImageClassificationModel
    _trained_settings, _new_settings = IMAGES, NEW_IMAGES
    _learns_from = (*LabelledEstimator._learns_from, "imageCol", "inputShapes")
    _auto = "AutoModelForImageClassification"
    _network = ImageNetwork

    @property
    def _learns(self) -> bool:
        return super()._learns or not (self.isDefined("modelFolder") or self.isSet("inputShapes"))

    def _learn(self, dataset: DataFrame) -> LearnedOfLabels:
        """Learns rows and classes, and the usual size of images if nothing else says a size."""
        learned = super()._learn(dataset)
        if self.isDefined("modelFolder") or self.isSet("inputShapes"):
            return learned
        return learned._replace(size=usual_size(dataset, self.getFeaturesCol()))

    def completed(self) -> Any:
        """Returns a copy with the Params that follow from the folder or, without one, from the rows."""
        if self.isDefined("modelFolder"):
            return super().completed()
        self._check_params()
        column = self.getFeaturesCol()
        others = {*self.getInputShapes()} - {column}
        if others:
            what = f"inputShapes names {min(others)!r}, and the column of images is {column!r}"
            hint = f"set inputShapes={{{column!r}: [channels, height, width]}}, or imageCol"
            raise ConfigError(what, hint=hint, param="inputShapes", code="ST-SHAPE")
        size = self._learned.size if self._learned is not None else None
        shape = self.getInputShapes().get(column, [3, *(size or _UNKNOWN_SIZE)])
        if len(shape) != 3 or shape[0] not in (1, 3, 4):
            what = f"inputShapes[{column!r}] is {list(shape)}"
            hint = "set [channels, height, width], such as [3, 64, 64]"
            raise ConfigError(what, hint=hint, param="inputShapes", code="ST-SHAPE")
        params = {"classes": self._classes or 2, "shape": list(shape)}
        estimator = LabelledEstimator.completed(self).copy()._set(module=ImageNetwork, moduleParams=params)
        return estimator._set(inputShapes={column: list(shape)}, inputLayouts={column: "image"})

    def _preprocess_of(self, folder: str, params: dict[str, Any]) -> FromFolder:
        Pixels(folder).load()  # A folder without an image processor is refused before there is a job.
        return Pixels(folder)
