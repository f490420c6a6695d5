"""The base class of estimators that learn something from the rows before they train on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from sparktorch.errors import ColumnError
from sparktorch.tasks.shared.estimator import AutomaticEstimator

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LearningEstimator", "check_rows"]


def check_rows(count: int) -> None:
    """Refuses to learn from no rows."""
    if not count:
        what, hint = "the DataFrame has no rows that train", "check the filter or the path it comes from"
        raise ColumnError(what, hint=hint, code="ST-NO-ROWS")


class LearningEstimator(AutomaticEstimator):
    """An estimator that learns something from the rows before it trains on them.

    `_learn_from` calls `_learn`, whose result is kept in `_learned`. From then on, `completed` sets the Params that
    follow from it.

    Attributes:
        _learned: What was learned; `None` before.
    """

    _learned: Any = None

    @property
    def _learns(self) -> bool:
        return True

    @property
    def _has_learned(self) -> bool:
        return self._learned is not None

    def _learn(self, dataset: DataFrame) -> Any:
        """Returns what follows from the rows; a subclass defines it."""
        raise NotImplementedError

    def _learn_rows(self, rows: DataFrame) -> None:
        self._learned = self._learn(rows)

    def _knowing(self, other: Any) -> Self:
        estimator = super()._knowing(other)
        if estimator is not self:
            estimator._learned = getattr(other, "_learned", None)
        return estimator
