"""Rows that stay with their ranks, each with its fold: trained on without a fold, and scored in it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.columns import carried_name
from sparktorch.errors import ColumnError
from sparktorch.ml.fit.attempts import with_restarts
from sparktorch.ml.fit.listeners import FitReport
from sparktorch.ml.fit.prepared_data import PreparedData
from sparktorch.ml.fit.translate import Request
from sparktorch.ml.model import TorchModelBase
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.prepare import Frame
from sparktorch.spark.launch.rank_pool import Results
from sparktorch.spark.session import slots, switched_on
from sparktorch.worker import TrainJob, score_fold

__all__ = ["MOST_BYTES", "FoldedRows", "NotInOnePass", "with_folds"]

MOST_BYTES = 1 << 30  # of a fold's scores that come to the driver
_IDLE_SECONDS = 600.0
_IN_NO_FOLD = -1  # trained on in every fold, as in Spark
_OUT_OF_RANGE = -2


class NotInOnePass(Exception):
    """The rows, once read, do not allow folds to be masks; says why.

    Attributes:
        expected: Whether listeners of the fit do not hear of it as a failure.
    """

    expected = True


def with_folds(dataset: DataFrame, name: str, *, folds: int, seed: int, column: str) -> DataFrame:
    """Adds an int column with the fold of each row: that of Spark's `CrossValidator`.

    Args:
        dataset: The user's rows.
        name: Name of the column to add.
        folds: Number of folds.
        seed: Seed of Spark's `rand`.
        column: The user's column of folds; "" to draw them.
    """
    if column:
        names = ColumnNames.of(dataset)
        if not isinstance(names.type_of(column), T.NumericType):
            kind = names.type_of(column).simpleString()
            raise ColumnError(f"foldCol {column!r} must be a number, but is {kind}", column=column)
        value = names.column(column)
        whole = F.when(value == F.floor(value), value.cast("int")).otherwise(F.lit(_IN_NO_FOLD))
        inside = (F.lit(0) <= value) & (value < F.lit(folds))
        return dataset.select("*", F.when(inside, whole).otherwise(F.lit(_OUT_OF_RANGE)).alias(name))
    drawn = dataset.select("*", F.rand(seed).alias(name))
    return drawn.withColumn(name, _fold_of(F.col(name), folds))


def _fold_of(draw: Column, folds: int) -> Column:
    """Returns the fold of a row by its draw; the limits are those of Spark's code, to the last bit."""
    share = 1.0 / folds
    found: Any = F
    for fold in range(folds):
        found = found.when((draw >= fold * share) & (draw < (fold + 1) * share), F.lit(fold))
    fold_of: Column = found.otherwise(F.lit(_IN_NO_FOLD))
    return fold_of


class FoldedRows(PreparedData):
    """Rows that ranks hold, with the fold of each."""

    def __init__(
        self,
        estimator: Any,
        dataset: DataFrame,
        *,
        fold: str,
        folds: int,
        drawn: bool,
        carried: Sequence[str],
        weight: str | None,
    ) -> None:
        """Reads nothing yet.

        Args:
            estimator: The rows that it needs are read.
            dataset: The user's rows and their folds.
            fold: Name of the column with the folds.
            folds: Number of folds.
            drawn: Whether the folds were drawn, rather than given by the user.
            carried: Numeric columns that evaluators need.
            weight: The column by whose sums equal scores are sent as one; `None` if each is sent.
        """
        super().__init__(estimator, estimator._task, dataset, idle_timeout=_IDLE_SECONDS)
        self._more_columns = {"fold": fold, "carried": carried}
        self._carried, self._folds, self._drawn, self._weight = carried, folds, drawn, weight
        self._task_of: Callable[..., Any] | None = None  # scores in place of a training
        self._last: tuple[Frame, TrainJob, Request, FitReport] | None = None

    def fit(self, estimator: Any, *, without: int | None, title: str) -> Any:
        """Fits on the rows outside of a fold, or on all rows.

        Raises:
            NotInOnePass: The rows have just been read, and fits on masked rows would not equal those on the folds.
        """
        with self._lock:
            self._without, self.title = without, title
            return estimator._fit(self)

    def attempt(self, frame: Frame, job: TrainJob, request: Request, report: FitReport) -> Results:
        """Trains in the ranks, or scores; see `PreparedData.attempt`."""
        self._last = (frame, job, request, report)
        return super().attempt(frame, job, request, report)

    def score(self, model: TorchModelBase, fold: int, results: Mapping[str, str]) -> pa.Table:
        """Scores a fold, as `transform` does; if a rank is lost, reads the rows and scores again, up to `maxRestarts`.

        Args:
            model: The model, with the Params of the scoring.
            fold: The fold.
            results: The results of the scorer to return, see `Scorer.score`, with the name of the column of each.

        Returns:
            The carried columns and the results, one row per row of the fold; or each row that differs, and its weight.

        Raises:
            NotInOnePass: The driver does not take so many scores.
        """
        given, weight = model._scoring(), self._weight
        scoring = {name: getattr(given, name) for name in ("batch_size", "precision", "compiled", "thresholds")}
        weighs = (
            None if weight is None else carried_name(self._carried.index(weight)) if weight in self._carried else ""
        )
        task = partial(score_fold, fold=fold, trained=model.trained, results=list(results), scoring=scoring)
        with self._lock:
            assert self._last is not None
            frame, job, request, report = self._last
            self._task_of = partial(task, weight=weighs, limit=MOST_BYTES // request.launch.world_size)
            try:
                again = lambda job, request: self.attempt(frame, job, request, report)  # noqa: E731
                found = with_restarts(self.dataset.sparkSession, job, request, again)
            finally:
                self._task_of = None
        if any(meta["beyond"] for meta, _ in found):
            raise _too_many()
        tables = [pa.ipc.open_stream(io.BytesIO(payload)).read_all() for _, payload in found if payload]
        names = [*self._carried, *results.values()]
        if weight is not None:
            names = [*(name for name in names if name != weight), weight]
        return pa.concat_tables(tables).rename_columns(names)

    def _run(self, job: TrainJob, report: FitReport) -> Results:
        if self._task_of is None:
            return super()._run(job, report)
        assert self._pool is not None
        return self._pool.run(self._task_of)

    @property
    def leaves_slots(self) -> bool:
        """Whether other jobs may find a slot while the ranks hold theirs."""
        spark, pool = self.dataset.sparkSession, self._pool
        count = slots(spark)
        if pool is None or count is None or switched_on(spark, "spark.dynamicAllocation.enabled"):
            return True
        return count > len(pool.facts)

    def _look_at(self, facts: list[dict[str, Any]], read_with: TrainJob) -> None:
        sizes: dict[int, int] = {}
        for fact in facts:
            for fold, rows in fact["folds"].items():
                sizes[int(fold)] = sizes.get(int(fold), 0) + rows
        if sizes.get(_OUT_OF_RANGE):
            raise ColumnError(
                f"Fold number must be in range [0, {self._folds}), which it is not in {sizes[_OUT_OF_RANGE]} rows",
                hint="set numFolds, or correct the column that foldCol names",
            )
        if any(fact["storage"] == "disk" for fact in facts):
            raise NotInOnePass("the rows are on disk")
        if any(fact["dropped"] or fact["nulls"] for fact in facts):
            raise NotInOnePass("rows have nulls, NaN or infinity")
        total = sum(sizes.values())
        for fold in range(self._folds):
            rows = sizes.get(fold, 0)
            if not self._drawn and rows in (0, total):  # as Spark's CrossValidator says it
                raise ValueError(f"The {'training' if rows else 'validation'} data at fold {fold} is empty.")
            if not rows:
                raise NotInOnePass(f"fold {fold} is empty")
        self._check_size(max(sizes.values(), default=0))
        if read_with.by_place or any(fact["uneven_folds"] for fact in facts):
            raise NotInOnePass("equal rows are split by their position")

    def _check_size(self, rows: int) -> None:
        """Refuses a fold whose scores are too large even if each is one number."""
        if self._weight is None and 8 * (len(self._carried) + 1) * rows > MOST_BYTES:
            raise _too_many()


def _too_many() -> NotInOnePass:
    return NotInOnePass(f"the scores of a fold take more than {MOST_BYTES >> 20:,} MiB")
