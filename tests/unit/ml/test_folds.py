"""Folds of a cross-validation leave groups whole."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.ml.evaluation import Evaluator

from sparktorch import Forecaster, Ranker, TorchCrossValidator, TorchEstimator
from sparktorch.errors import ConfigError

LINEAR = {"module": "torch.nn:Linear", "moduleParams": {"in_features": 1, "out_features": 1}}


class Nothing(Evaluator):
    """Measures nothing."""

    def _evaluate(self, dataset: Any) -> float:
        return 0.0


@pytest.mark.parametrize(
    "estimator",
    [
        Ranker(**LINEAR, groupCol="query", labelCol="grade"),
        TorchEstimator(**LINEAR, groupCol="bag", loss=lambda output, label, sizes: output),
        Forecaster(orderCol="day", labelCol="sold", context=3, horizon=2),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_folds_that_are_drawn_row_by_row_are_refused_for_groups(estimator: Any) -> None:
    given = {"estimator": estimator, "estimatorParamMaps": [{}], "evaluator": Nothing()}
    with pytest.raises(ConfigError, match="foldCol is not set, and folds drawn row by row would divide the groups"):
        TorchCrossValidator(**given)._check()
    TorchCrossValidator(**given, foldCol="fold")._check()
