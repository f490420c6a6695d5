"""The Params of the classifier of texts."""

from __future__ import annotations

from sparktorch.ml.params.classes import CLASSIFICATION_MODEL
from sparktorch.ml.params.declare import ParamSpec as P
from sparktorch.ml.params.declare import declared, only
from sparktorch.ml.params.mixins import ClassificationModelParams, ClassifierParams
from sparktorch.tasks.shared.params import FROM_FOLDER, PRETRAINED, automatic

__all__ = ["TextClassificationModelParams", "TextClassifierParams"]

# fmt: off
TEXT = (
    P("textCol", "str", "text", "the column of text", compared=False, columns="inputs"),
    P("maxLength", "int", 128,
      "the number of tokens after which a row is cut off (> 0); for a model that takes fewer, the default is that "
      "number, and a larger value is refused", compared=True),
)
# fmt: on

_CLASSIFIER = automatic((*PRETRAINED, *TEXT, *FROM_FOLDER))
_MODEL = (*CLASSIFICATION_MODEL, *only(PRETRAINED, "modelFolder"), *only(TEXT, "textCol"))

TextClassifierParams = declared(__name__, "TextClassifierParams", _CLASSIFIER, ClassifierParams)
TextClassificationModelParams = declared(__name__, "TextClassificationModelParams", _MODEL, ClassificationModelParams)

# The sections of docs/params.md.
SECTIONS = {"`TextClassifier` and `ImageClassifier`": (TEXT,)}
