"""The base class of classifiers of text and images, which learn from the rows how many classes there are."""

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
    """What a classifier has learned from the rows.

    Attributes:
        rows: The number of training rows.
        held_out: The number of validation rows.
        classes: The number of classes; 0 if labels are no numbers, which the ranks then refuse.
        size: The usual height and width of images, if the network needs one size.
    """

    rows: int
    held_out: int
    classes: int
    size: tuple[int, int] | None = None


class LabelledEstimator(LearningEstimator):
    """A classifier that learns the number of classes from the rows if `numLabels` is not set."""

    _learns_from: tuple[str, ...] = ("validationIndicatorCol", "labelCol", "numLabels")
    _learned: LearnedOfLabels | None = None

    @property
    def _learns(self) -> bool:
        return self._needs_count or Values(self)["numLabels"] is None

    @property
    def _classes(self) -> int:
        """The number of classes, from `numLabels` or from the rows; 0 before anything is learned from the rows."""
        if Values(self)["numLabels"]:
            classes: int = Values(self)["numLabels"]
            return classes
        return self._learned.classes if self._learned is not None else 0

    def completed(self) -> Self:
        """Returns the estimator, or a copy with a number for each Param that is "auto"."""
        classes = Values(self)["numLabels"]
        if classes is not None:
            at_least("numLabels", classes, 2)
        return super().completed()

    def _learn(self, dataset: DataFrame) -> LearnedOfLabels:
        """Counts rows and classes in one job; refuses labels that cannot be classes."""
        dataset = self._without_dropped(dataset)
        p = Values(self)
        names = ColumnNames.of(dataset)
        column = p["labelCol"]
        validates = F.lit(False)
        if p["validationIndicatorCol"]:
            validates = F.coalesce(names.column(p["validationIndicatorCol"]), F.lit(False))
        numeric = isinstance(names.type_of(column), NUMERIC)
        label = names.column(column).cast("double") if numeric else F.lit(None).cast("double")
        finite = F.when(F.abs(label) < float("inf"), label)  # NaN is larger than infinity in Spark.
        counts = (F.count(F.when(~validates, 1)), F.count(F.when(validates, 1)))
        ((trained, held_out, smallest, largest),) = dataset.agg(*counts, F.min(finite), F.max(finite)).collect()
        # Where the estimator holds rows out itself, it learns from all rows.
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
        if self._learned is None:
            return super()._count(rows)
        return self._learned.rows, self._learned.held_out
