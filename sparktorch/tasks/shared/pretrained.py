"""What classifiers of text and of images share: they go on from a local folder of Hugging Face's."""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import replace
from typing import Any

from sparktorch.adapters.huggingface.folder import classifier_in, config_in, has_new_weights
from sparktorch.adapters.huggingface.preprocess import FromFolder
from sparktorch.errors import ConflictError
from sparktorch.ml.classification import TorchClassificationModel, TorchClassifier
from sparktorch.ml.fit.refusals import check_set
from sparktorch.ml.fit.values import Values
from sparktorch.model.trained_module import TrainedModule
from sparktorch.tasks.shared.labelled import LabelledEstimator
from sparktorch.tasks.shared.settings import TaskSettings

__all__ = ["FolderClassifier", "FolderModel"]

_SET_BY_ESTIMATOR = ("module", "moduleParams", "preprocess", "inputCols")


class _OneColumn:
    """A mixin for `textCol` or `imageCol` in place of `featuresCol`."""

    def getFeaturesCol(self) -> str:
        """Gets the value of `textCol`, or of `imageCol`."""
        name: str = self.getOrDefault("textCol" if self.hasParam("textCol") else "imageCol")  # type: ignore[attr-defined]
        return name


class FolderModel(_OneColumn, TorchClassificationModel):
    """A classifier that reads its tokenizer or image processor from `modelFolder`."""

    _holder = "modelFolder"

    @property
    def trained(self) -> TrainedModule:
        """The trained module, whose `preprocess` reads `modelFolder`."""
        trained = super().trained
        folder = Values(self)["modelFolder"]
        if not isinstance(trained.preprocess, FromFolder) or trained.preprocess.folder == folder:
            return trained
        return replace(trained, preprocess=replace(trained.preprocess, folder=str(folder)))


class FolderClassifier(_OneColumn, LabelledEstimator, TorchClassifier):
    """The base class of both classifiers.

    Attributes:
        _trained_settings: The constants for a folder with trained weights.
        _new_settings: The constants for random weights.
        _auto: The name of the class in transformers that makes a classifier from a folder.
        _network: The class of the module that is trained without a folder, if the task has one.
    """

    _trained_settings: TaskSettings
    _new_settings: TaskSettings
    _auto: str
    _network: Any = None

    @property
    def _task_settings(self) -> TaskSettings:
        folder = Values(self)["modelFolder"]
        return self._new_settings if folder is None or has_new_weights(folder) else self._trained_settings

    def completed(self) -> Any:
        """Returns a copy with the Params that follow from the folder: module, arguments of the module, and preprocess.

        Raises:
            ConfigError: `modelFolder` is not set, or a Param is set that it replaces.
            ModuleError: There is no such folder, or no model in it.
        """
        self._check_params()
        check_set(Values(self), "modelFolder", "pass the path of a local folder")
        folder = os.path.abspath(str(self.getOrDefault("modelFolder")))
        classes = self._classes
        if not self.isDefined("numLabels"):
            classes = max(classes, getattr(config_in(folder), "num_labels", 2))
        params = classifier_in(folder, self._auto, classes)
        preprocess = self._preprocess_of(folder, params)
        estimator = super().completed().copy()
        return estimator._set(modelFolder=folder, module=folder, moduleParams=params, preprocess=preprocess)

    def _check_params(self) -> None:
        """Refuses Params that the estimator sets itself, and Params that contradict each other."""
        p = Values(self)
        has_network = p["module"] is not None and p["module"] is self._network
        # A copy that `completed` has returned has the Params that the estimator sets, but for `inputCols`.
        is_completed = has_network or isinstance(p["preprocess"], FromFolder)
        for name in _SET_BY_ESTIMATOR:
            if p.is_set(name) and (name == "inputCols" or not is_completed):
                what = f"{name} is set, which the estimator chooses itself"
                hint = "leave it out, or use TorchClassifier"
                raise ConflictError(what, hint=hint, param=name)
        if p["nullPolicy"] == "fill":
            raise ConflictError(
                "nullPolicy is 'fill', and fillValue stands for no text and for no image",
                hint="'drop' leaves out rows without one; or replace them before fit",
                param="nullPolicy",
            )
        if p.is_set("inputShapes") and p["modelFolder"] is not None:
            raise ConflictError(
                "inputShapes is set, and what is in modelFolder says the size of its inputs",
                hint="leave it out; the folder's preprocessor_config.json has the size",
                param="inputShapes",
            )

    @abstractmethod
    def _preprocess_of(self, folder: str, params: dict[str, Any]) -> FromFolder:
        """Returns the preprocess of a folder; it may add entries to `params`, the arguments of the module."""
