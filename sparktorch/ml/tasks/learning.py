"""The base class of estimators that learn something of rows before they train on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.sql import DataFrame

from sparktorch.errors import ColumnError
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.checks import naming_params
from sparktorch.ml.fit.prepared_data import PreparedData, Source, needs_other_rows
from sparktorch.ml.fit.translate import translate
from sparktorch.ml.fit.values import Values
from sparktorch.spark.rdd import dataframe_of

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from typing_extensions import Self

__all__ = ["LearningEstimator", "check_rows"]


def check_rows(count: int) -> None:
    """Refuses to learn of no rows."""
    if not count:
        what, hint = "the DataFrame has no rows that train", "check the filter or the path it comes from"
        raise ColumnError(what, hint=hint, code="ST-NO-ROWS")


class LearningEstimator(TorchEstimatorBase[Any]):
    """An estimator whose `_learn` returns what it learns of rows, and whose `completed` sets what follows from that.

    Attributes:
        _learns_from: The Params that say what is learned.
        _seen: What was learned; `None` before.
    """

    _learns = True
    _learns_from: tuple[str, ...]
    _seen: Any = None

    def _learn(self, dataset: DataFrame) -> Any:
        raise NotImplementedError

    def _arranged(self, dataset: DataFrame) -> DataFrame:
        """Returns the rows as they are trained, once they were learned of."""
        return dataset

    def _learned(self, dataset: DataFrame) -> tuple[Self, DataFrame]:
        if self._seen is not None:
            return self, dataset
        translate(self, self._task)  # refuses Params before there is a job
        that = self.copy()
        with naming_params(self):
            that._seen = self._learn(dataset)
        return that, that._arranged(dataset)

    def fitMultiple(
        self, dataset: DataFrame | PreparedData, paramMaps: Sequence[ParamMap]
    ) -> Iterator[tuple[int, Any]]:
        """Trains a model for each of several settings of Params; see `TorchClassifier.fitMultiple`.

        Settings that change what is learned of the rows are fitted one by one.
        """
        if isinstance(dataset, PreparedData) or self._seen is not None:
            return super().fitMultiple(dataset, paramMaps)
        if any(param.name in self._learns_from for params in paramMaps for param in params):
            return Estimator.fitMultiple(self, dataset, paramMaps)
        estimator, rows = self._learned(dataframe_of(dataset, "fit"))
        return estimator.fitMultiple(rows, paramMaps)

    def _fit_on(self, source: Source, judge: Callable[[dict[str, Any]], bool] | None = None) -> Any:
        that, known = self, getattr(source, "estimator", None)
        if self._seen is None and isinstance(known, LearningEstimator):
            ours, theirs = Values(self), Values(known)
            if other := [name for name in self._learns_from if ours[name] != theirs[name]]:
                raise needs_other_rows(other)
            that = self.copy()
            that._seen = known._seen
        return super(LearningEstimator, that)._fit_on(source, judge)
