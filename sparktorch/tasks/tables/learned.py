"""What estimators of tables learn from the rows before they train: categories, scales, bins and labels, in one job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.distribution import MOST_VALUES
from sparktorch.errors import ColumnError
from sparktorch.ml.fit.values import Values
from sparktorch.ml.scoring.column_metadata import classes_of
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import NUMERIC, is_numeric, kept_as
from sparktorch.spark.frame.refusals import unsuitable
from sparktorch.tasks.shared.column_statistics import Figures, check_rows, column_statistics, round_figure
from sparktorch.tasks.tables.kinds import Kinds, chooses_kinds, is_number, kinds_of_columns, order_inputs
from sparktorch.tasks.tables.preprocess import BINS, TableColumns, scaled_edges

__all__ = ["LearnedTable", "check_numbers_to_predict", "integer_categories", "learn_table", "warn_of_constants"]

_LOG = logging.getLogger(__name__)
_BOUND = 3.0  # Scaled numbers do not exceed it, as in RealMLP.
_MOST_LABELS = 100_000  # All labels come to the driver, and the network has an output for each.
_LARGEST_INTEGER = 2.0**53  # Spark and torch get larger integers as doubles, which are not exact.
# In a table with more columns of integers than this, integers that repeat are measurements, such as pixels.
_MOST_INTEGER_COLUMNS = 100
_FEWEST_ROWS_OF_INTEGER = 2  # Integers are measured, not codes, if a value has fewer rows than this on average.
_SHORT_RANGE = 32  # If a range has no more integers than this, all are categories, even those that no row has.


class LearnedTable(NamedTuple):
    """What an estimator has learned from the rows of a table.

    Attributes:
        table: Categories, centres and scales of the input columns.
        inputs: The input columns, in order.
        outputs: The number of outputs of the network.
        labels: The labels of a classifier's classes, empty if they are numbers.
        scales: Mean and standard deviation of each label of a regressor.
        nonnegative: The positions of a regressor's labels that are 0 or more in all training rows.
        edges: The edges of the bins of each column of numbers.
        rows: The number of training rows.
        held_out: The number of validation rows.
        constants: The columns of numbers that are the same in all training rows.
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
    nonnegative: tuple[int, ...] = ()


class _Statistics(NamedTuple):
    """What one job computes, from the training rows unless an attribute says otherwise.

    Attributes:
        categories: The number of rows of each value, by column.
        numbers: The figures of numbers and times, by column.
        label_numbers: The figures of labels that are numbers, by column; for classes, from all rows if the
            estimator holds rows out itself.
        trained_labels: The labels that are texts.
        validated_labels: The labels that are texts, in the validation rows.
        rows: The number of training rows.
        held_out: The number of validation rows.
    """

    categories: dict[str, dict[str, int]]
    numbers: dict[str, Figures]
    label_numbers: dict[str, Figures]
    trained_labels: list[str]
    validated_labels: list[str]
    rows: int
    held_out: int


def learn_table(dataset: DataFrame, estimator: Any) -> LearnedTable:
    """Computes statistics of the training rows in one Spark job.

    Classes also come from the held-out rows if the estimator holds rows out itself: it does so by a hash, which may
    hold out all rows of a rare class.

    Raises:
        ColumnError: A column or a label is of no type that can be trained on, or there is nothing to learn.
    """
    p = Values(estimator)
    names = ColumnNames.of(dataset)
    holds_out = bool(estimator._marks)
    classifies = estimator._task == "classification"
    label_columns: list[str] = p["labelCols"] or [p["labelCol"]]
    if estimator._task == "regression":
        check_numbers_to_predict(names, label_columns, estimator)
    kinds = kinds_of_columns(p, names)
    statistics = _statistics(dataset, p, names, kinds, classifies=classifies, holds_out=holds_out)
    check_rows(statistics.rows + statistics.held_out if holds_out else statistics.rows)
    categories: dict[str, list[Any]] = {
        name: _frequent(counts, names.type_of(name), p["minCount"]) for name, counts in statistics.categories.items()
    }
    if chooses_kinds(p):
        categories |= integer_categories(statistics.numbers, names, p["maxIntegerCategories"], p["minCount"])
    labels: list[str] = []
    outputs = len(label_columns)
    if classifies:
        labels, outputs = _classes(dataset, names, p["labelCol"], statistics, holds_out=holds_out)
    label_figures = [statistics.label_numbers[name] for name in label_columns if name in statistics.label_numbers]
    missing = [
        name for name in kinds.numeric if 0 < statistics.numbers[name].rows < statistics.rows and name not in categories
    ]
    constants = [
        name
        for name, figures in statistics.numbers.items()
        if figures.smallest == figures.largest and name not in missing
    ]
    centres = {
        name: [*figures.distribution.centre_and_scale(round_figure(figures.deviation))]
        for name, figures in statistics.numbers.items()
    }
    edges = [
        scaled_edges(figures.distribution.edges(BINS), centres[name], _BOUND)
        for name, figures in statistics.numbers.items()
    ]
    return LearnedTable(
        table=TableColumns(categories, kinds.times, centres, missing, _BOUND),
        inputs=order_inputs(p, names, kinds),
        outputs=outputs,
        labels=labels,
        scales=[[round_figure(figures.mean), round_figure(figures.deviation)] for figures in label_figures],
        edges=edges,
        rows=statistics.rows,
        held_out=statistics.held_out,
        constants=tuple(constants),
        nonnegative=tuple(
            index for index, figures in enumerate(label_figures) if figures.rows and figures.smallest >= 0
        ),
    )


def _statistics(
    dataset: DataFrame, p: Values, names: ColumnNames, kinds: Kinds, *, classifies: bool, holds_out: bool
) -> _Statistics:
    """Counts values and computes figures in one job; `holds_out` says that the estimator holds rows out itself."""
    validates = names.column(p["validationIndicatorCol"]) if p["validationIndicatorCol"] else F.lit(False)
    trains = ~validates
    texts = {name: _text(names, name) for name in kinds.categorical}
    numbers = {name: names.column(name).cast("double") for name in kinds.numeric}
    numbers |= {name: names.column(name) for name in kinds.times}

    label_texts: dict[str, Column] = {}
    if classifies and isinstance(names.type_of(p["labelCol"]), T.StringType):
        label = _text(names, p["labelCol"])
        label_texts = {"trained": F.when(trains, label), "validated": F.when(validates, label)}
    if classifies:
        number_labels = [p["labelCol"]] if isinstance(names.type_of(p["labelCol"]), NUMERIC) else []
    else:
        number_labels = [name for name in p["labelCols"] or [p["labelCol"]] if is_number(names.type_of(name))]
    label_rows = F.lit(True) if classifies and holds_out else trains

    integers = _integer_columns(names, kinds.numeric)
    most_values = dict.fromkeys(numbers, MOST_VALUES)
    if chooses_kinds(p) and not _are_measurements(integers):
        # One value more than may be categories shows that there are too many.
        most_values |= dict.fromkeys(integers, max(MOST_VALUES, p["maxIntegerCategories"] + 1))
    statistics = column_statistics(
        dataset,
        categories={name: F.when(trains, text) for name, text in texts.items()},
        most_categories=p["maxCategories"],
        labels=label_texts,
        most_labels=_MOST_LABELS + 1,
        numbers={name: F.when(trains, number) for name, number in numbers.items()},
        most_values=most_values,
        label_numbers={name: F.when(label_rows, names.column(name).cast("double")) for name in number_labels},
        conditions={"trains": trains, "validates": validates},
    )
    return _Statistics(
        categories=statistics.categories,
        numbers=statistics.numbers,
        label_numbers=statistics.label_numbers,
        trained_labels=list(statistics.labels.get("trained", ())),
        validated_labels=list(statistics.labels.get("validated", ())),
        rows=statistics.rows["trains"],
        held_out=statistics.rows["validates"],
    )


def _text(names: ColumnNames, name: str) -> Column:
    """Returns a column as text, with the digits that its values have in Arrow."""
    return names.column(name).cast(str(kept_as(names.type_of(name)))).cast("string")


def _frequent(counts: Mapping[str, int], kind: T.DataType, fewest: int) -> list[Any]:
    """Returns the values that enough rows have, as the type that the column has in Arrow."""
    parsers: dict[str, Callable[[str], Any]] = {
        "string": str,
        "boolean": _boolean,
        "float": float,
        "double": float,
    }
    parse = parsers.get(str(kept_as(kind)), int)
    return [parse(text) for text, rows in counts.items() if rows >= fewest]


def _boolean(text: str) -> bool:
    return text == "true"


def _integer_columns(names: ColumnNames, columns: Iterable[str]) -> list[str]:
    """Returns the columns whose type is an integer."""
    return [name for name in columns if isinstance(names.type_of(name), T.IntegralType)]


def _are_measurements(integers: Sequence[str]) -> bool:
    """Whether there are so many columns of integers that even integers that repeat are taken as measurements."""
    return len(integers) > _MOST_INTEGER_COLUMNS


def integer_categories(
    figures: Mapping[str, Figures], names: ColumnNames, most: int, least: int
) -> dict[str, list[int]]:
    """Returns the whole numbers of columns that are categories, too: months and codes, but also identifiers.

    - In a short range, all numbers are categories, even those that no row has.
    - In a wider range, the numbers that at least `least` rows have are categories, provided that the column has at most
      `most` distinct numbers, that these repeat, and that the table does not have very many columns of integers.
    - A column with a number beyond 2**53 has no categories: doubles do not tell such numbers apart.
    """
    if not most:
        return {}
    categories = {}
    integers = _integer_columns(names, figures)
    for name in integers:
        column = figures[name]
        if max(-column.smallest, column.largest) >= _LARGEST_INTEGER:
            continue
        values = column.distribution.values
        whole_range = range(int(column.smallest), int(column.largest) + 1)
        repeats = len(values) <= min(most, column.rows // _FEWEST_ROWS_OF_INTEGER)
        is_measured = _are_measurements(integers) and len(values) > _SHORT_RANGE
        chosen: list[int] = []
        if len(whole_range) <= min(most, _SHORT_RANGE):
            chosen = list(whole_range)
        elif column.distribution.whole and repeats and not is_measured:
            rows_of_values = zip(values, column.distribution.weights, strict=True)
            chosen = [int(value) for value, rows in rows_of_values if rows >= least]
        if len(chosen) > 2:  # A number with two values tells them apart as well as categories would.
            categories[name] = chosen
    return categories


def _classes(
    dataset: DataFrame, names: ColumnNames, label: str, statistics: _Statistics, *, holds_out: bool
) -> tuple[list[str], int]:
    """Returns the labels of the classes, empty if they are numbers, and how many classes there are."""
    kind = names.type_of(label)
    labels: list[str] = []
    if isinstance(kind, T.StringType):
        labels = _text_labels(label, statistics, holds_out=holds_out)
        classes = len(labels)
        has_one_label = classes < 2
    elif isinstance(kind, T.BooleanType):
        labels = ["false", "true"]
        classes = 2
        has_one_label = False
    elif label not in statistics.label_numbers:
        what = f"column {label!r} is {kind.simpleString()}, and labels of classes are text, booleans or whole numbers"
        raise ColumnError(what, hint="cast it to string: then the labels are learned", column=label)
    else:
        figures = statistics.label_numbers[label]
        classes = classes_of(dataset, label) or _number_of_classes(label, figures)
        has_one_label = classes < 2 or figures.smallest == figures.largest
    if has_one_label:
        hint = "a classifier learns to tell two or more apart"
        what = f"column {label!r} has the same label in all rows that train"
        raise ColumnError(what, hint=hint, column=label, code="ST-ONE-LABEL")
    return labels, classes


def _text_labels(column: str, statistics: _Statistics, *, holds_out: bool) -> list[str]:
    """Returns the labels of the training rows; refuses too many, and labels that only validation rows have.

    With `holds_out`, it returns the labels of all rows: the estimator held rows out itself.
    """
    trained = {*statistics.trained_labels}
    validated = {*statistics.validated_labels}
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
    """Returns the number of classes whose labels are numbers; refuses labels that do not begin with 0."""
    if figures.smallest != 0:
        what = f"column {column!r} has labels {figures.smallest:g} ... {figures.largest:g}"
        raise ColumnError(
            f"{what}, and classes are counted from 0",
            hint="subtract the smallest, or cast the column to string: then the labels are learned; TabularRegressor "
            "predicts numbers",
            column=column,
            code="ST-LABEL-RANGE",
        )
    return int(figures.largest) + 1


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
    """Logs a warning for columns of numbers that never change, and another one if a label never changes."""
    if learned.constants:
        listed = ", ".join(map(repr, learned.constants))
        _LOG.warning("the same number, or null, in all rows that train, and so without effect: %s", listed)
    if learned.rows and any(deviation == 0 for _, deviation in learned.scales):
        _LOG.warning("the label is the same in all rows that train, and so is what the model will predict")
