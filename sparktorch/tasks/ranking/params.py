"""The Params of the ranker and its model."""

from __future__ import annotations

from sparktorch.ml.params import tables as t
from sparktorch.ml.params.classes import AFTER_LOSS, BEFORE_LABELS, BEFORE_LOSS, REGRESSION_MODEL
from sparktorch.ml.params.declare import changed, declared, only
from sparktorch.ml.params.mixins import EstimatorParams, RegressionModelParams
from sparktorch.tasks.shared.params import automatic
from sparktorch.tasks.tables.params import TABLE

__all__ = ["RankerParams", "RankingModelParams"]

_LOSS = (
    "'listnet', 'ranknet' or 'lambdarank', or a callable (scores, labels, sizes) -> loss per group, or its import path"
)
_GROUP = changed(only(t.GROUPS, "groupCol"), "groupCol", doc="the column that groups rows, such as a query")
_RANKER = automatic(
    (
        *(*BEFORE_LABELS, *_GROUP, *BEFORE_LOSS, *TABLE),
        *(*changed(t.LOSS, "loss", default="listnet", doc=_LOSS), *AFTER_LOSS),
    )
)

RankerParams = declared(__name__, "RankerParams", _RANKER, EstimatorParams)
RankingModelParams = declared(__name__, "RankingModelParams", (*REGRESSION_MODEL, *_GROUP), RegressionModelParams)
