"""`help` of an estimator is a page that one can work from: every Param, and an example that runs."""

from __future__ import annotations

import doctest
import pydoc
from typing import Any

import pytest
from pyspark.sql import SparkSession

import sparktorch
from sparktorch import (
    Forecaster,
    Ranker,
    TabularClassifier,
    TorchClassifier,
    TorchEstimator,
    TorchRegressor,
    TorchTuner,
)
from sparktorch.ml.fit.prepared_data import PreparedData

ESTIMATORS = [TorchClassifier, TorchEstimator, TorchRegressor]


@pytest.mark.parametrize("kind", [*ESTIMATORS, PreparedData, Forecaster, Ranker, TabularClassifier, TorchTuner])
def test_the_example_runs(spark: SparkSession, kind: Any) -> None:
    public = {name: getattr(sparktorch, name) for name in sparktorch.__all__}
    names = {**public, kind.__name__: kind, "spark": spark}
    example = doctest.DocTestParser().get_doctest(kind.__doc__, names, kind.__name__, None, None)
    assert len(example.examples) >= 5
    told: list[str] = []
    assert doctest.DocTestRunner(verbose=False).run(example, out=told.append).failed == 0, "".join(told)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_help_shows_every_param_with_its_default_and_its_meaning(kind: Any) -> None:
    shown = pydoc.plain(pydoc.render_doc(kind))
    assert "batchSize: 'int' = 256" in shown
    for param in kind().params:
        assert f"{param.name}: " in shown
    assert "batchSize: Rows of one optimizer step over all workers together (> 0)." in shown
