"""The base class of classifiers of text and images, which learn of rows how many classes they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparktorch.base.config import at_least
from sparktorch.errors import ColumnError
from sparktorch.ml.fit.values import Values
from sparktorch.ml.scoring.column_metadata import classes_of
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import NUMERIC
from sparktorch.tasks.shared.column_statistics import check_rows
from sparktorch.tasks.shared.estimator import LearningEstimator

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LabelledEstimator", "LearnedOfLabels"]

_MOST_CLASSES = 100_000


class LearnedOfLabels(NamedTuple):
    """What a classifier has learned of rows.

    Attributes:
        rows: The number of rows that train.
        held_out: The number of rows that validate.
        classes: The number of classes; 0 where the labels do not say it, and what reads them refuses them.
        size: The usual height and width of images, of a network that needs it.
    """

    rows: int
    held_out: int
    classes: int
    size: tuple[int, int] | None = None


class LabelledEstimator(LearningEstimator):
    """A classifier of which `numLabels` need not be set."""

    _learns_from: tuple[str, ...] = ("validationIndicatorCol", "labelCol", "numLabels")
    _learned: LearnedOfLabels | None = None

    @property
    def _learns(self) -> bool:
        return self._needs_count or Values(self)["numLabels"] is None

    @property
    def _classes(self) -> int:
        """The number of classes: that of `numLabels`, or of the rows; 0 before they are learned of."""
        classes: int = Values(self)["numLabels"] or (self._learned.classes if self._learned is not None else 0)
        return classes

    def completed(self) -> Self:
        """Returns the estimator, or a copy with a number for each Param that is "auto"."""
        classes = Values(self)["numLabels"]
        if classes is not None:
            at_least("numLabels", classes, 2)
        return super().completed()

    def _learn(self, dataset: DataFrame) -> LearnedOfLabels:
        dataset = self._without_dropped(dataset)
        p, names = Values(self), ColumnNames.of(dataset)
        column, marks = p["labelCol"], F.lit(False)
        if p["validationIndicatorCol"]:
            marks = F.coalesce(names.column(p["validationIndicatorCol"]), F.lit(False))
        label = F.lit(None).cast("double")
        numeric = isinstance(names.type_of(column), NUMERIC)
        if numeric:
            label = names.column(column).cast("double")
        finite = F.when(F.abs(label) < float("inf"), label)  # NaN is larger.
        counts = (F.count(F.when(~marks, 1)), F.count(F.when(marks, 1)))
        ((trained, held_out, smallest, largest),) = dataset.agg(*counts, F.min(finite), F.max(finite)).collect()
        # Rows that the user has marked do not train; those that the estimator would hold out may.
        check_rows(trained + held_out if self._marks else trained)
        if not numeric or smallest is None:
            return LearnedOfLabels(trained, held_out, 0)
        if smallest < 0:
            raise ColumnError(
                f"column {column!r} has labels {smallest:g} ... {largest:g}, and classes are counted from 0",
                hint="subtract the smallest; leave out rows that have no class, or give them any and the weight 0",
                column=column,
                code="ST-LABEL-RANGE",
            )
        if smallest == largest:
            raise ColumnError(
                f"column {column!r} has the same label in all rows",
                hint="a classifier learns to tell two or more apart",
                column=column,
                code="ST-ONE-LABEL",
            )
        classes = max(int(largest) + 1, classes_of(dataset, column))
        if classes > _MOST_CLASSES:
            what = f"column {column!r} has labels up to {largest:,.0f}, and a classifier has an output for each"
            raise ColumnError(what, hint="does labelCol name identifiers? classes are 0, 1, ...", column=column)
        return LearnedOfLabels(trained, held_out, classes)

    def _count(self, rows: DataFrame) -> tuple[int, int]:
        return (self._learned.rows, self._learned.held_out) if self._learned is not None else super()._count(rows)
