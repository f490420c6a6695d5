"""Rows that stay with their ranks, each with its fold: trained on without a fold, and scored in it."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.ml.tuning import CrossValidator
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.columns import carried_name
from sparktorch.errors import ColumnError, ConfigError, counted
from sparktorch.ml.fit.attempts import with_restarts
from sparktorch.ml.fit.listeners import FitReport
from sparktorch.ml.fit.prepared_data import PreparedData
from sparktorch.ml.fit.translate import Request
from sparktorch.ml.model import TorchModelBase
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.refusals import no_number
from sparktorch.spark.launch.rank_pool import Results
from sparktorch.worker import TrainJob, score_fold

__all__ = ["MOST_BYTES", "FoldedRows", "NotInOnePass"]

MOST_BYTES = 1 << 30  # A fold's scores that come to the driver take at most these bytes.
_IDLE_SECONDS = 600.0
_IN_NO_FOLD = -1  # As in Spark, such a row trains in every fold.
_OUT_OF_RANGE = -2

# A tuple describes a fold: its number, its rows, those of them marked for validation, and the sum of the rows' keys.
Content = frozenset[tuple[int, int, int, int]]


class NotInOnePass(Exception):
    """The rows, once read, do not allow folds to be masks; the message says why.

    Attributes:
        expected: Whether listeners of the fit do not hear of it as a failure.
    """

    expected = True


class FoldedRows(PreparedData):
    """Rows that ranks hold, with the fold of each."""

    def __init__(
        self,
        validator: CrossValidator,
        estimator: Any,
        dataset: DataFrame,
        *,
        carried: Sequence[str],
        weight: str | None,
        contents: set[Content],
    ) -> None:
        """Reads nothing yet; equal scores are sent as one, with the sum of the column `weight`, unless it is `None`.

        `contents` gets what each fold has, whenever rows are read; it is one set for all groups of ranks of a search.
        """
        self._carried, self._folds = carried, validator.getNumFolds()
        self._contents, self._weight = contents, weight
        name = f"{validator.uid}_fold".replace(".", "_")
        data = _with_folds(dataset, name, self._folds, validator.getSeed(), validator.getFoldCol())
        super().__init__(estimator, estimator._task, data, idle_timeout=_IDLE_SECONDS)
        self._more_columns = {"fold": name, "carried": carried}
        self._scoring_task: Callable[..., Any] | None = None  # If it is set, ranks score in place of training.
        self._last: tuple[DataFrame, Request[TrainJob], FitReport] | None = None

    def fit(self, estimator: Any, *, without: int | None, title: str) -> Any:
        """Fits on the rows outside of a fold, or on all rows.

        A `NotInOnePass` says that fits on the rows, which were just read, would not equal those on the folds.
        """
        with self._lock:
            self._without, self.title = without, title
            return estimator._fit(self)

    def attempt(self, data: DataFrame, request: Request[TrainJob], report: FitReport) -> Results:
        """Trains in the ranks, or scores; see `PreparedData.attempt`."""
        self._last = (data, request, report)
        try:
            return super().attempt(data, request, report)
        except Exception as error:
            if self._closed:
                raise ConfigError("the search has ended, by an error or an interrupt elsewhere") from error
            raise

    def score(self, model: TorchModelBase, fold: int, results: Mapping[str, str]) -> pa.Table:
        """Scores a fold, as `transform` does; if a rank is lost, reads the rows and scores again, up to `maxRestarts`.

        The table has the carried columns and the results, named as asked for, with one row per row of the fold; or each
        row that differs, and its weight. A `NotInOnePass` says that the driver does not take so many scores.
        """
        scoring, weight = replace(model._scoring(), layers=()), self._weight  # No evaluator reads what layers return.
        # Ranks know a carried column by its wire name; "" lets each row weigh 1, and None sends every row.
        wire_weight = weight
        if weight is not None:
            wire_weight = carried_name(self._carried.index(weight)) if weight in self._carried else ""
        task = partial(score_fold, fold=fold, trained=model.trained, results=list(results), scoring=scoring)
        with self._lock:
            assert self._last is not None
            data, request, report = self._last
            self._scoring_task = partial(task, weight=wire_weight, limit=MOST_BYTES // request.launch.world_size)

            def attempt(request: Request[TrainJob]) -> Results:
                return self.attempt(data, request, report)

            try:
                scores = with_restarts(data.sparkSession, request, attempt, report.attempts)
            finally:
                self._scoring_task = None
        if any(meta["beyond"] for meta, _ in scores):
            raise NotInOnePass(f"the scores of a fold take more than {MOST_BYTES >> 20:,} MiB")
        tables = [pa.ipc.open_stream(io.BytesIO(payload)).read_all() for _, payload in scores if payload]
        names = [name for name in (*self._carried, *results.values()) if name != weight]
        return pa.concat_tables(tables).rename_columns(names if weight is None else [*names, weight])

    def _run(self, job: TrainJob, report: FitReport) -> Results:
        if self._scoring_task is None:
            return super()._run(job, report)
        assert self._pool is not None
        return self._pool.run(self._scoring_task)

    def _look_at(self, facts: list[dict[str, Any]], read_with: TrainJob) -> None:
        content = _content(facts)
        sizes = Counter({fold: rows + marked for fold, rows, marked, _ in content})
        if sizes[_OUT_OF_RANGE]:
            raise ColumnError(
                f"Fold number must be in range [0, {self._folds}), which it is not in "
                f"{counted(sizes[_OUT_OF_RANGE], 'row', 'rows')}",
                hint="set numFolds, or correct the column that foldCol names",
            )
        why = ""
        if any(fact["storage"] == "disk" for fact in facts):
            why = "the rows are on disk"
        elif any(fact["dropped"] or fact["nulls"] for fact in facts):
            why = "rows have nulls, NaN or infinity"
        elif not all(sizes[fold] for fold in range(self._folds)):
            # Spark refuses empty folds of the user's, with its own message.
            why = "a fold is empty"
        elif read_with.by_position or any(fact["uneven_folds"] for fact in facts):
            why = "equal rows are split by their position"
        elif self._without is not None:  # In a fit on all rows, folds do not matter.
            self._contents.add(content)
            if len(self._contents) > 1:
                why = "the DataFrame, read again, has other rows, or in other folds"
        if why:
            raise NotInOnePass(why)


def _content(facts: list[dict[str, Any]]) -> Content:
    """Returns what all ranks have of each fold."""
    sums: dict[int, list[int]] = {}
    for fact in facts:
        for fold, counts in fact["folds"].items():
            before = sums.get(int(fold), [0, 0, 0])
            sums[int(fold)] = [total + count for total, count in zip(before, counts, strict=True)]
    return frozenset((fold, rows, marked, keys % 2**64) for fold, (rows, marked, keys) in sums.items())


def _with_folds(dataset: DataFrame, name: str, folds: int, seed: int, column: str) -> DataFrame:
    """Adds an int column with the fold of each row, that of Spark's `CrossValidator`: the user's, or a drawn one."""
    if column:
        names = ColumnNames.of(dataset)
        if not isinstance(names.type_of(column), T.NumericType):
            raise no_number(names.type_of(column), column)
        value = names.column(column)
        whole = F.when(value == F.floor(value), value.cast("int")).otherwise(F.lit(_IN_NO_FOLD))
        inside = (F.lit(0) <= value) & (value < F.lit(folds))
        return dataset.select("*", F.when(inside, whole).otherwise(F.lit(_OUT_OF_RANGE)).alias(name))
    draw, share, drawn_fold = F.col(name), 1.0 / folds, F.lit(_IN_NO_FOLD)
    for fold in range(folds):
        # The limits are computed as in Spark's code, to the last bit: another rounding would move rows to other folds.
        is_inside = (draw >= fold * share) & (draw < (fold + 1) * share)
        drawn_fold = F.when(is_inside, F.lit(fold)).otherwise(drawn_fold)
    return dataset.select("*", F.rand(seed).alias(name)).withColumn(name, drawn_fold)
