"""The Params that several tasks have, and those of other estimators as tasks have them."""

from __future__ import annotations

from dataclasses import replace

from sparktorch.ml.params import tables as t
from sparktorch.ml.params.classes import CLASSIFIER
from sparktorch.ml.params.declare import ParamSpec as P
from sparktorch.ml.params.declare import without

__all__ = ["AUTOMATIC", "FROM_FOLDER", "PRETRAINED", "automatic"]

# fmt: off
HELD_OUT = (
    P("validationFraction", "float", 0.1,
      "the share of rows that validate and do not train, 50,000 rows at most, where epochs is 'auto' or this is set, "
      "and validationIndicatorCol is not; a hash of the row chooses them, a ranker holds out whole groups, and a "
      "forecaster the last windows of series; 0 holds out none (>= 0, < 1)", compared="unless default"),
)

PRETRAINED = (
    P("modelFolder", "str", None,
      "a local folder with a model of Hugging Face's and its tokenizer or image processor, at the same path on each "
      "machine; an image classifier without one trains a small new network", compared=True),
    P("numLabels", "int", None,
      "the number of classes; by default that of the folder's configuration or, if it is larger, of the labels (> 1)",
      compared=True),
)
# fmt: on

# Estimators for one task choose these by the rows, as long as their value is "auto".
AUTOMATIC = (
    "epochs",
    "batchSize",
    "learningRate",
    "scheduler",
    "earlyStoppingPatience",
    "validationInterval",
    "validationUnit",
)
_OR_AUTO = {"int": "int | str", "float": "float | str"}


def automatic(table: tuple[P, ...]) -> tuple[P, ...]:
    """Returns a table whose Params of `AUTOMATIC` are "auto" by default, and adds the Param of rows to hold out."""
    specs: list[P] = []
    for spec in table:
        if spec.name in AUTOMATIC:
            kind, doc = _OR_AUTO.get(spec.type, spec.type), f"{spec.doc}; 'auto' chooses by the number of rows"
            spec = replace(spec, type=kind, default="auto", doc=doc)
        specs.append(spec)
        if spec.name == "validationIndicatorCol":
            specs += HELD_OUT
    return tuple(specs)


# What a classifier has that goes on from a folder: it makes the module, and its inputs, itself.
FROM_FOLDER = without(CLASSIFIER, *(spec.name for spec in (*t.MODULE, *t.COLUMNS, *without(t.INPUTS, "nullPolicy"))))

# The sections of docs/params.md.
SECTIONS = {
    "Rows that estimators for one task hold out": (HELD_OUT,),
    "`TextClassifier` and `ImageClassifier`": (PRETRAINED,),
}
