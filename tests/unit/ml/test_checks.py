"""The columns that a model will add are checked against those of the DataFrame that it is fitted on."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import types as T

from sparktorch import TorchClassifier, TorchEstimator, TorchRegressor
from sparktorch.errors import ColumnError, ConfigError, ModuleError, SparkTorchError
from sparktorch.ml.fit.checks import check_new_columns, check_version
from sparktorch.ml.fit.translate import translate

SCHEMA = T.StructType().add("features", T.ArrayType(T.FloatType())).add("prediction", T.DoubleType())


def check(estimator: Any, outputs: int = 1) -> None:
    conf = SimpleNamespace(get=lambda key, *rest: "false")
    dataset: Any = SimpleNamespace(schema=SCHEMA, sparkSession=SimpleNamespace(conf=conf))
    check_new_columns(estimator, dataset, outputs)


@pytest.mark.parametrize(
    ("estimator", "kind", "says"),
    [
        (TorchClassifier(), ColumnError, "already has a column 'prediction'"),
        (TorchRegressor(predictionCol="Features"), ColumnError, "already has a column 'Features'"),
        (TorchEstimator(outputCols=["a", "features"]), ColumnError, "already has a column 'features'"),
        (TorchEstimator(outputCols=["a", "a"]), ConfigError, "two output columns are called 'a' and 'a'"),
        (TorchClassifier(predictionCol="Probability"), ConfigError, "'probability' and 'Probability', which to Spark"),
    ],
)
def test_output_columns_that_cannot_be_added_are_refused(
    estimator: Any, kind: type[SparkTorchError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        check(estimator)


def test_output_columns_that_are_left_out_or_not_named_yet_are_none() -> None:
    check(TorchRegressor(predictionCol=""))
    check(TorchClassifier(predictionCol="", probabilityCol="", rawPredictionCol=""))
    check(TorchEstimator(outputCols=["a", "b"]), 2)
    check(TorchEstimator(), 2)  # setOutputCols of the model names them


NET = """
from torch import nn
class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x) + {0}
"""


def test_a_module_that_was_edited_between_two_fits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "edited_net.py"

    def again(text: str) -> Any:
        file.write_text(text)
        importlib.invalidate_caches()
        return importlib.reload(importlib.import_module("edited_net")).Net

    check_version(again(NET.format(1)))
    check_version(again("# a comment" + NET.format(1)))
    changed = again(NET.format(2))
    for source in (changed, "edited_net:Net", changed(2, 1)):
        with pytest.raises(ConfigError, match="module 'edited_net' has other code than in an earlier fit"):
            check_version(source)
    check_version(str(tmp_path))  # a folder


def test_a_module_that_cannot_be_imported_is_refused_as_such_and_not_for_its_lack_of_a_loss() -> None:
    with pytest.raises(ModuleError, match=r"cannot import 'tests\.support\.nets:Mpl'"):
        translate(TorchEstimator(module="tests.support.nets:Mpl"), "generic")
