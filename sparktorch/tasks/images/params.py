"""The Params of the classifier of images."""

from __future__ import annotations

from sparktorch.ml.params import tables as t
from sparktorch.ml.params.classes import CLASSIFICATION_MODEL
from sparktorch.ml.params.declare import ParamSpec as P
from sparktorch.ml.params.declare import declared, only
from sparktorch.ml.params.mixins import ClassificationModelParams, ClassifierParams
from sparktorch.tasks.shared.params import FROM_FOLDER, PRETRAINED, automatic

__all__ = ["ImageClassificationModelParams", "ImageClassifierParams"]

# fmt: off
IMAGE = (
    P("imageCol", "str", "image", "the binary column of image files, such as JPEG and PNG", compared=False,
      columns="inputs"),
)
# fmt: on

_CLASSIFIER = automatic((*PRETRAINED, *IMAGE, *only(t.INPUTS, "inputShapes"), *FROM_FOLDER))
_MODEL = (*CLASSIFICATION_MODEL, *only(PRETRAINED, "modelFolder"), *IMAGE)

ImageClassifierParams = declared(__name__, "ImageClassifierParams", _CLASSIFIER, ClassifierParams)
ImageClassificationModelParams = declared(__name__, "ImageClassificationModelParams", _MODEL, ClassificationModelParams)

# The sections of docs/params.md.
SECTIONS = {"`TextClassifier` and `ImageClassifier`": (IMAGE,)}
