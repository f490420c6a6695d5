"""The Params of the forecaster and its model."""

from __future__ import annotations

from sparktorch.ml.params import tables as t
from sparktorch.ml.params.classes import AFTER_LOSS, MODEL
from sparktorch.ml.params.declare import ParamSpec as P
from sparktorch.ml.params.declare import changed, declared, only
from sparktorch.ml.params.mixins import ModelParams, RegressorParams
from sparktorch.tasks.shared.params import automatic

__all__ = ["ForecasterParams", "ForecastingModelParams"]

# fmt: off
SERIES = (
    P("context", "int", None,
      "the rows of a series from which a forecast is made (> 1); by default two horizons, or three seasons if these "
      "are more, as far as half of a series goes", compared=True),
    P("horizon", "int", None, "rows of a forecast (> 0)", compared=True),
    P("pastCols", "list[str]", [], "columns of numbers that are known up to the last row of the context",
      compared=True, columns="fit"),
    P("futureCols", "list[str]", [], "columns of numbers that are known ahead, such as prices and the calendar",
      compared=True, columns="fit"),
    P("staticCols", "list[str]", [], "columns of numbers, strings and booleans that do not change within a series",
      compared=True, columns="fit"),
    P("quantiles", "list[float]", [],
      "quantiles to forecast, ascending, such as [0.1, 0.5, 0.9], in place of one value (> 0, < 1)", compared=True),
)

WINDOWS = (
    P("step", "int", 1, "the rows from the beginning of one training window to that of the next (> 0)", compared=True),
    P("scaling", "str", "window",
      "'window' gives the module the target of each window less the mean of its context, in units of its standard "
      "deviation; 'none' gives it the target as it is", compared=True),
    P("season", "int", None,
      "the rows of a season, whose profile the default network continues; by default fit finds it in some of the "
      "series; 1 says that there is none", compared="unless default"),
)
# fmt: on

_GROUP = "the column that tells series apart; without it, all rows are one"
_ORDER = "the column that orders the rows of a series in even steps: whole numbers, dates or timestamps"
_SERIES = (*changed(changed(t.GROUPS, "groupCol", doc=_GROUP), "orderCol", doc=_ORDER), *SERIES)
_FORECASTER = automatic(
    (
        *(*_SERIES, *WINDOWS, *t.MODULE, *t.LABEL, *t.PREDICTION, *t.WEIGHT),
        *(*only(t.INPUTS, "nullPolicy"), *only(t.ROWS, "validationIndicatorCol")),
        *(*changed(t.LOSS, "loss", default="L1Loss"), *AFTER_LOSS),
    )
)

ForecasterParams = declared(__name__, "ForecasterParams", _FORECASTER, RegressorParams)
ForecastingModelParams = declared(__name__, "ForecastingModelParams", (*_SERIES, *MODEL, *t.LABEL), ModelParams)

# The sections of docs/params.md.
SECTIONS = {"`Forecaster`": (SERIES, WINDOWS)}
