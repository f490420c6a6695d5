"""The Params of the recommender and its model."""

from __future__ import annotations

from sparktorch.ml.params import tables as t
from sparktorch.ml.params.classes import AFTER_LOSS, MODEL
from sparktorch.ml.params.declare import ParamSpec as P
from sparktorch.ml.params.declare import changed, declared, only, without
from sparktorch.ml.params.mixins import GenericParams, ModelParams
from sparktorch.tasks.shared.params import automatic

__all__ = ["RecommenderModelParams", "RecommenderParams"]

# fmt: off
PAIR = (
    P("userCol", "str", "user", "the column of users: strings or whole numbers", compared=False, columns="inputs"),
    P("itemCol", "str", "item", "the column of items: strings or whole numbers", compared=False, columns="inputs"),
    P("userFeatures", "list[str]", [], "columns of numbers that describe the user of a row", compared=False,
      columns="inputs"),
    P("itemFeatures", "list[str]", [], "columns of numbers that describe the item of a row", compared=False,
      columns="inputs"),
)

RATING = (
    P("ratingCol", "str", "rating",
      "the column of ratings; with implicitPrefs, of how often the item was chosen (>= 0), where an empty name means "
      "once", compared=False, columns="fit"),
)

FACTORS = (
    P("rank", "int", 32, "the number of elements of a user's and of an item's vector (> 0)", compared=True),
    P("regParam", "float", 0.1,
      "the factor of the sum of squares of both vectors of a row, which is added to the loss of the row; with "
      "ratings, both are in units of their standard deviation (>= 0)", compared=True),
    P("implicitPrefs", "bool", False,
      "whether rows are what users chose, and not what they thought of it: items are ranked, not rated", compared=True),
    P("alpha", "float", 1.0,
      "with implicitPrefs, what a unit of log(1 + rating) adds to the weight 1 of a row; a row whose rating is 0 does "
      "not count (>= 0)", compared="unless default"),
    P("numNegatives", "int", None,
      "with implicitPrefs, the number of other items with which that of a row is compared, drawn anew in each epoch "
      "(> 0); by default all items, or 64 where there are more than 20,000", compared=True),
)

COLD_START = (
    P("coldStartStrategy", "str", "nan",
      "what transform does with pairs whose user or item the fit did not have: 'nan' predicts NaN, 'drop' leaves them "
      "out", compared=False),
)
# fmt: on

_RECOMMENDER = automatic(
    (
        *(*PAIR, *RATING, *FACTORS, *COLD_START, *only(t.MODULE, "moduleParams"), *t.PREDICTION, *t.ROWS),
        *only(t.INPUTS, "nullPolicy"),
        *changed(without(AFTER_LOSS, "trainingStep"), "optimizer", default="Adagrad"),
    )
)
_MODEL = (*MODEL, *PAIR, *COLD_START)

RecommenderParams = declared(__name__, "RecommenderParams", _RECOMMENDER, GenericParams)
RecommenderModelParams = declared(__name__, "RecommenderModelParams", _MODEL, ModelParams)

# The sections of docs/params.md.
SECTIONS = {"`Recommender`": (PAIR, RATING, FACTORS, COLD_START)}
