"""What estimators of tables learn of the rows before they train: categories, scales, bins and labels, in one job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.distribution import MOST_VALUES
from sparktorch.errors import ColumnError
from sparktorch.ml.scoring.column_metadata import classes_of
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import NUMERIC, is_numeric, kept_as
from sparktorch.spark.frame.refusals import unsuitable
from sparktorch.tasks.shared.column_statistics import Figures, categories_and_figures, check_rows, rounded
from sparktorch.tasks.tables.kinds import Kinds, TableParams, is_number, kinds_of_columns, ordered
from sparktorch.tasks.tables.preprocess import BINS, TableColumns, scaled_edges

__all__ = ["LearnedTable", "check_numbers_to_predict", "integer_categories", "learn_table", "warn_of_constants"]

_LOG = logging.getLogger(__name__)
_BOUND = 3.0  # Scaled numbers do not exceed it, as in RealMLP.
_MOST_LABELS = 100_000  # All of them come to the driver, and the network has an output for each.
_MOST_INTEGER_COLUMNS = (
    100  # In a table of more columns of integers, those that repeat are measurements, such as pixels.
)
_FEWEST_ROWS_OF_INTEGER = 2  # A column of integers whose values have fewer rows on average is measured, not a code.
_SHORT_RANGE = 32  # In a range of at most so many integers, all are categories, even if no row has them.
_LARGEST_INTEGER = 2.0**53  # Spark and torch get larger integers as doubles, which are not exact.


class LearnedTable(NamedTuple):
    """What an estimator has learned of the rows of a table.

    Attributes:
        table: Categories, centres and scales of the input columns.
        inputs: The input columns, in order.
        outputs: The number of outputs of the network.
        labels: The labels of a classifier's classes, empty if they are numbers.
        scales: Mean and standard deviation of each label of a regressor.
        edges: The edges of the bins of each column of numbers.
        rows: The number of rows that train.
        held_out: The number of rows that validate.
        constants: The columns of numbers that are the same in all rows that train.
    """

    table: TableColumns
    inputs: list[str]
    outputs: int
    labels: list[str]
    scales: list[list[float]]
    edges: list[list[float]]
    rows: int = 0
    held_out: int = 0
    constants: tuple[str, ...] = ()


class _Statistics(NamedTuple):
    """What one job counts: of rows that train, but for the labels of those that validate."""

    categories: dict[str, dict[str, int]]  # The number of rows of each value, by column.
    numbers: dict[str, Figures]  # The figures of numbers and times, by column.
    labels: list[Figures]  # The figures of labels that are numbers.
    trained_labels: list[str]
    validated_labels: list[str]
    rows: int
    held_out: int


def learn_table(dataset: DataFrame, estimator: Any) -> LearnedTable:
    """Learns of the rows that train, in one job.

    Where the estimator holds rows out itself, labels are those of all rows.

    Raises:
        ColumnError: A column or a label is of no type that can be trained on, or there is nothing to learn.
    """
    params, names = TableParams.of(estimator), ColumnNames.of(dataset)
    holds_out = bool(estimator._marks)
    if estimator._task == "regression":
        check_numbers_to_predict(names, params.labels, estimator)
    kinds, classifies = kinds_of_columns(params, names), estimator._task == "classification"
    statistics = _statistics(dataset, params, names, kinds, classifies=classifies, all_rows=holds_out)
    check_rows(statistics.rows + statistics.held_out * holds_out)
    categories: dict[str, list[Any]] = {
        name: _frequent(counts, names.type_of(name), params.min_count) for name, counts in statistics.categories.items()
    }
    if params.chooses_kinds:
        most, least = params.max_integer_categories, params.min_count
        categories |= integer_categories(statistics.numbers, names, most, least)
    labels: list[str] = []
    outputs = len(params.labels)
    if classifies:
        labels, outputs = _classes(dataset, names, params.labels[0], statistics, holds_out=holds_out)
    missing = [
        name for name in kinds.numeric if 0 < statistics.numbers[name].rows < statistics.rows and name not in categories
    ]
    centres = {
        name: [*figures.distribution.centre_and_scale(rounded(figures.deviation))]
        for name, figures in statistics.numbers.items()
    }
    return LearnedTable(
        table=TableColumns(categories, kinds.times, centres, missing, _BOUND),
        inputs=ordered(params, names, kinds),
        outputs=outputs,
        labels=labels,
        scales=[[rounded(figures.mean), rounded(figures.deviation)] for figures in statistics.labels],
        edges=[
            scaled_edges(figures.distribution.edges(BINS), centres[name], _BOUND)
            for name, figures in statistics.numbers.items()
        ],
        rows=statistics.rows,
        held_out=statistics.held_out,
        constants=tuple(
            name
            for name, figures in statistics.numbers.items()
            if figures.smallest == figures.largest and name not in missing
        ),
    )


def _statistics(
    dataset: DataFrame, params: TableParams, names: ColumnNames, kinds: Kinds, *, classifies: bool, all_rows: bool
) -> _Statistics:
    """Counts values and computes figures in one job; with `all_rows`, labels that are numbers are those of all rows."""
    validates = names.column(params.validation) if params.validation else F.lit(False)
    text_label = params.labels[0] if classifies and isinstance(names.type_of(params.labels[0]), T.StringType) else ""
    number_labels = [
        name
        for name in params.labels
        if (isinstance(names.type_of(name), NUMERIC) if classifies else is_number(names.type_of(name)))
    ]
    numbers = [names.column(name).cast("double") for name in kinds.numeric]
    numbers += [names.column(name) for name in kinds.times]
    texts = [
        names.column(name).cast(str(kept_as(names.type_of(name)))).cast("string")
        for name in (*kinds.categorical, *([text_label] if text_label else ()))
    ]
    integers = {name for name in kinds.numeric if isinstance(names.type_of(name), T.IntegralType)}
    few_columns = params.chooses_kinds and len(integers) <= _MOST_INTEGER_COLUMNS
    most_integers = max(MOST_VALUES, params.max_integer_categories + 1 if few_columns else 0)
    labels_of = F.lit(True) if classifies and all_rows else ~validates
    values, figures = categories_and_figures(
        dataset,
        [
            *(F.when(~validates, text) for text in texts),
            *(F.when(validates, text) for text in texts[len(kinds.categorical) :]),
        ],
        [
            *(F.when(~validates, number) for number in numbers),
            *(F.when(labels_of, names.column(name).cast("double")) for name in number_labels),
            *(F.when(rows, F.lit(1.0)) for rows in (~validates, validates)),
        ],
        limited=len(kinds.categorical),
        distinct=[most_integers if name in integers else MOST_VALUES for name in (*kinds.numeric, *kinds.times)],
        most=params.max_categories,
        labels=_MOST_LABELS + 1,
    )
    *figures, trained, held_out = figures
    label_values = values[len(kinds.categorical) :]
    return _Statistics(
        categories=dict(zip(kinds.categorical, values, strict=False)),
        numbers=dict(zip((*kinds.numeric, *kinds.times), figures, strict=False)),
        labels=figures[len(numbers) :],
        trained_labels=list(label_values[0]) if text_label else [],
        validated_labels=list(label_values[1]) if text_label else [],
        rows=trained.rows,
        held_out=held_out.rows,
    )


def _frequent(counts: Mapping[str, int], kind: T.DataType, fewest: int) -> list[Any]:
    """Returns the values that enough rows have, as the type that the column has in Arrow."""
    value_of: Callable[[str], Any] = int
    match kept_as(kind):
        case "string":
            value_of = str
        case "boolean":
            value_of = "true".__eq__
        case "float" | "double":
            value_of = float
    return [value_of(text) for text, rows in counts.items() if rows >= fewest]


def integer_categories(
    figures: Mapping[str, Figures], names: ColumnNames, most: int, least: int
) -> dict[str, list[int]]:
    """Returns the whole numbers of columns that are categories, too: months and codes, but also identifiers.

    Of a range of a few numbers, all are categories; of at most `most` distinct ones, those that `least` rows have,
    unless the table has very many such columns. None are in a column whose numbers hardly repeat, or with one beyond
    2**53, which doubles do not tell apart.
    """
    if not most:
        return {}
    categories = {}
    integers = {name: column for name, column in figures.items() if isinstance(names.type_of(name), T.IntegralType)}
    many_columns = len(integers) > _MOST_INTEGER_COLUMNS
    for name, column in integers.items():
        if max(-column.smallest, column.largest) >= _LARGEST_INTEGER:
            continue
        values, counts = column.distribution.values, column.distribution.weights
        chosen: Sequence[int] = range(int(column.smallest), int(column.largest) + 1)
        if len(chosen) > min(most, _SHORT_RANGE):
            repeated = len(values) <= min(most, column.rows // _FEWEST_ROWS_OF_INTEGER)
            measured = many_columns and len(values) > _SHORT_RANGE
            chosen = []
            if column.distribution.whole and repeated and not measured:
                chosen = [int(value) for value, rows in zip(values, counts, strict=True) if rows >= least]
        if len(chosen) > 2:
            categories[name] = list(chosen)
    return categories


def _classes(
    dataset: DataFrame, names: ColumnNames, label: str, statistics: _Statistics, *, holds_out: bool
) -> tuple[list[str], int]:
    """Returns the labels of the classes, empty if they are numbers, and how many classes there are."""
    kind = names.type_of(label)
    if isinstance(kind, T.StringType):
        labels = _text_labels(label, statistics, holds_out=holds_out)
        classes, alike = len(labels), len(labels) < 2
    elif isinstance(kind, T.BooleanType):
        labels, classes, alike = ["false", "true"], 2, False
    elif not statistics.labels:
        what = f"column {label!r} is {kind.simpleString()}, and labels of classes are text, booleans or whole numbers"
        raise ColumnError(what, hint="cast it to string: then the labels are learned", column=label)
    else:
        (figures,) = statistics.labels
        labels = []
        classes = classes_of(dataset, label) or _number_of_classes(label, figures)
        alike = classes < 2 or figures.smallest == figures.largest
    if alike:
        hint = "a classifier learns to tell two or more apart"
        what = f"column {label!r} has the same label in all rows that train"
        raise ColumnError(what, hint=hint, column=label, code="ST-ONE-LABEL")
    return labels, classes


def _text_labels(column: str, statistics: _Statistics, *, holds_out: bool) -> list[str]:
    """Returns the labels of the rows that train; refuses others in the rows that validate, and too many."""
    trained, validated = {*statistics.trained_labels}, {*statistics.validated_labels}
    if holds_out:
        trained |= validated
    if len(trained) > _MOST_LABELS:
        what = f"column {column!r} has more than {_MOST_LABELS:,} labels"
        hint = "a classifier has an output for each: does labelCol name identifiers, or numbers as text?"
        raise ColumnError(what, hint=hint, column=column)
    if validated - trained:
        unknown = min(validated - trained)
        what = f"column {column!r} has the label {unknown!r} in validation rows, and in no row that trains"
        raise ColumnError(what, hint="let rows with it train, or leave them out", column=column)
    return sorted(trained)


def _number_of_classes(column: str, figures: Figures) -> int:
    """Returns the number of classes of labels that are numbers, by the smallest and the largest."""
    smallest, largest = figures.smallest, figures.largest
    if smallest != 0:
        raise ColumnError(
            f"column {column!r} has labels {smallest:g} ... {largest:g}, and classes are counted from 0",
            hint="subtract the smallest, or cast the column to string: then the labels are learned",
            column=column,
            code="ST-LABEL-RANGE",
        )
    return int(largest) + 1


def check_numbers_to_predict(names: ColumnNames, labels: Iterable[str], estimator: Any) -> None:
    """Refuses labels that are no numbers, such as texts, before there is a job."""
    for name in labels:
        kind = names.type_of(name)
        if not (isinstance(kind, NUMERIC) or is_numeric(kind)):
            hint = estimator._hint_of_labels
            if isinstance(kind, T.StringType):
                hint += f"; numbers as text: cast({names.sql(name)} as double)"
            raise unsuitable(kind, name, "", hint, must=f"a number for {type(estimator).__name__}")


def warn_of_constants(learned: LearnedTable) -> None:
    """Names columns of numbers from which nothing can be learned, and says where all labels are the same."""
    if learned.constants:
        listed = ", ".join(map(repr, learned.constants))
        _LOG.warning("the same number, or null, in all rows that train, and so without effect: %s", listed)
    if learned.rows and any(deviation == 0 for _, deviation in learned.scales):
        _LOG.warning("the label is the same in all rows that train, and so is what the model will predict")
