"""The Params of the estimators of tables."""

from __future__ import annotations

from sparktorch.ml.params import tables as t
from sparktorch.ml.params.classes import CLASSIFIER, REGRESSOR
from sparktorch.ml.params.declare import ParamSpec as P
from sparktorch.ml.params.declare import declared, without
from sparktorch.ml.params.mixins import ClassifierParams, RegressorParams
from sparktorch.tasks.shared.params import automatic

__all__ = ["TABLE", "TabularClassifierParams", "TabularRegressorParams"]

# fmt: off
TABLE = (
    P("categoricalCols", "list[str]", None,
      "the columns of categories; dates and timestamps among them become categories of their parts, such as the "
      "month; by default the columns of strings, booleans, dates and timestamps", compared=True, columns="inputs"),
    P("numericCols", "list[str]", None,
      "the columns of numbers; by default those of numbers that categoricalCols does not name", compared=True,
      columns="inputs"),
    P("minCount", "int", 2, "the fewest training rows of a category; a rarer one counts as unknown", compared=True),
    P("maxCategories", "int", 10_000,
      "the most categories of a column, its most frequent ones; the others count as unknown", compared=True),
    P("maxIntegerCategories", "int", 4000,
      "the most distinct values of a column of integers that is taken as categories, too, if neither categoricalCols "
      "nor numericCols is set, and the values have two rows each on average; its categories are the values that "
      "minCount training rows have, or all integers of a range of at most 32; 0 takes no such column",
      compared="unless default"),
)
# fmt: on

# These say how columns become tensors, which the estimator decides itself.
_UNUSED = ("featuresCol", *(spec.name for spec in without(t.INPUTS, "nullPolicy")))
_CLASSIFIER = automatic((*TABLE, *without(CLASSIFIER, *_UNUSED)))
_REGRESSOR = automatic((*TABLE, *without(REGRESSOR, *_UNUSED)))

TabularClassifierParams = declared(__name__, "TabularClassifierParams", _CLASSIFIER, ClassifierParams)
TabularRegressorParams = declared(__name__, "TabularRegressorParams", _REGRESSOR, RegressorParams)

# The sections of docs/params.md.
SECTIONS = {"`TabularClassifier`, `TabularRegressor` and `Ranker`": (TABLE,)}
