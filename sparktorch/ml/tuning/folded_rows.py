"""Rows that stay with their ranks, each with its fold: ranks train on all folds but one, and score this one."""

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

MOST_BYTES = 1 << 30  # The scores of a fold that come to the driver take at most so many bytes.
_IDLE_SECONDS = 600.0
_IN_NO_FOLD = -1  # As in Spark, such a row trains in every fold.
_OUT_OF_RANGE = -2

# A tuple describes a fold by four numbers: the fold's number, how many rows train, how many rows are marked for
# validation, and the sum of the rows' keys.
Content = frozenset[tuple[int, int, int, int]]


class NotInOnePass(Exception):
    """The search cannot read the rows once for all folds; the message says why.

    Attributes:
        expected: Whether a fit that ends by this error is no failure to its listeners: another way is taken.
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
        """Reads nothing yet.

        Args:
            validator: The validator, whose Params say how rows are divided into folds.
            estimator: The estimator that says which columns are read.
            dataset: The rows.
            carried: The numeric columns that the evaluator reads beside the predictions.
            weight: Equal scores are sent as one row, with the sum of this column; `None` sends every row.
            contents: The set to which the content of the folds is added whenever rows are read. All groups of ranks in
                a search share this set.
        """
        self._carried = carried
        self._folds = validator.getNumFolds()
        self._contents = contents
        self._weight = weight
        name = f"{validator.uid}_fold".replace(".", "_")
        data = _with_folds(dataset, name, self._folds, validator.getSeed(), validator.getFoldCol())
        super().__init__(estimator, estimator._task, data, idle_timeout=_IDLE_SECONDS)
        self._more_columns = {"fold": name, "carried": carried}
        self._scoring_task: Callable[..., Any] | None = None  # If this is set, ranks score instead of training.
        self._last: tuple[DataFrame, Request[TrainJob], FitReport] | None = None

    def fit(self, estimator: Any, *, without: int | None, title: str) -> Any:
        """Fits on the rows outside of the fold `without`, or on all rows.

        A `NotInOnePass` says that this fit would not equal a fit on a DataFrame of the same rows.
        """
        with self._lock:
            self._without = without
            self.title = title
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

        The table has the carried columns, and the results under the names in `results`. It has a row for each row of
        the fold; with a weight, it has the different rows, each with the sum of its weights. A `NotInOnePass` says that
        there are too many scores for the driver.
        """
        scoring = replace(model._scoring(), layers=())  # No evaluator reads the output of layers.
        weight = self._weight
        # Ranks call a carried column by its wire name. With "", each row weighs 1; with None, every row is sent.
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
            # Spark's own way refuses empty folds in the user's column, with Spark's message.
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
    """Returns a description of each fold, added up over all ranks."""
    sums: dict[int, list[int]] = {}
    for fact in facts:
        for fold, counts in fact["folds"].items():
            before = sums.get(int(fold), [0, 0, 0])
            sums[int(fold)] = [total + count for total, count in zip(before, counts, strict=True)]
    return frozenset((fold, rows, marked, keys % 2**64) for fold, (rows, marked, keys) in sums.items())


def _with_folds(dataset: DataFrame, name: str, folds: int, seed: int, column: str) -> DataFrame:
    """Adds an int column with the fold that Spark's `CrossValidator` gives each row: from `column`, or drawn."""
    if column:
        names = ColumnNames.of(dataset)
        if not isinstance(names.type_of(column), T.NumericType):
            raise no_number(names.type_of(column), column)
        value = names.column(column)
        whole = F.when(value == F.floor(value), value.cast("int")).otherwise(F.lit(_IN_NO_FOLD))
        inside = (F.lit(0) <= value) & (value < F.lit(folds))
        return dataset.select("*", F.when(inside, whole).otherwise(F.lit(_OUT_OF_RANGE)).alias(name))
    draw = F.col(name)
    share = 1.0 / folds
    drawn_fold = F.lit(_IN_NO_FOLD)
    for fold in range(folds):
        # The limits are computed as in Spark's code, to the last bit: another rounding would move rows to other folds.
        is_inside = (draw >= fold * share) & (draw < (fold + 1) * share)
        drawn_fold = F.when(is_inside, F.lit(fold)).otherwise(drawn_fold)
    return dataset.select("*", F.rand(seed).alias(name)).withColumn(name, drawn_fold)
