"""Estimators of tables as they are: columns of strings, booleans, numbers, dates and timestamps."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from torch import nn

from sparktorch.base.imports import import_path, load_object
from sparktorch.data.distribution import MOST_VALUES
from sparktorch.data.tables import BINS, TableColumns, TableNetwork, network_settings, scaled_edges
from sparktorch.errors import ColumnError
from sparktorch.ml.classification import TorchClassificationModel, TorchClassifier
from sparktorch.ml.fit.values import Values
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.params.mixins import TabularClassifierParams, TabularRegressorParams
from sparktorch.ml.params.task_tables import TABLE
from sparktorch.ml.regression import TorchRegressionModel, TorchRegressor
from sparktorch.ml.scoring.column_metadata import check_numbers, class_index, classes_of, nominal
from sparktorch.ml.tasks.automatic import TABLES
from sparktorch.ml.tasks.column_statistics import Figures, categories_and_figures
from sparktorch.ml.tasks.learning import LearningEstimator, check_rows
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import NUMERIC, is_numeric, kept_as
from sparktorch.spark.frame.refusals import unsuitable

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    *("TABLE_NETWORK", "TabularClassificationModel", "TabularClassifier", "TabularEstimator", "TabularModel"),
    *("TabularRegressionModel", "TabularRegressor"),
]

logger = logging.getLogger(__name__)

# A `module` names the network for tables by its class, and that of a loaded model by its path.
TABLE_NETWORK = (TableNetwork, import_path(TableNetwork))
_ROLES = ("labelCol", "labelCols", "weightCol", "validationIndicatorCol", "idCol", "groupCol")
_LEARNS_FROM = (*_ROLES, *(spec.name for spec in TABLE), "inputCols")
_DRAWN = re.compile(r"_[0-9a-f]{12}_rand$")  # by which Spark's CrossValidator and TrainValidationSplit mark rows
_MOST_LABELS = 100_000  # what comes to the driver, and an output for each
_BOUND = 3.0  # Scaled numbers come near it and do not exceed it, as in RealMLP.
# The weight, in units of the loss of a row, of the squared vector of a category, and of a number that is one as well:
# the number itself says most of it already. Both were chosen on the development tables of the benchmark.
_CATEGORY_PENALTY = 1.0
_NUMBER_PENALTY = 30.0
_WEIGHT_DECAY = 0.01  # AdamW has this one by default.
_MOST_CODED = 100  # In a table of more columns of integers, those that repeat are measurements, such as pixels.
# The Params that the penalty would not suit: one of the optimizer's, and what clips the gradients of the loss alone.
_WITHOUT_PENALTY = ("optimizer", "parameterGroups", "freeze", "gradientClipNorm", "gradientClipValue")
_FEWEST_ROWS_OF_CODE = 2  # A column of integers whose values have fewer rows on average is measured, not coded.
_FEW_INTEGERS = 32  # the longest range of integers that are categories even if no row has them
_LARGEST_CODE = 2.0**53  # Larger integers are learned of as doubles, which are not exact.
_TIMES = (T.DateType, T.TimestampType, T.TimestampNTZType)


def _is_true(text: str) -> bool:
    return text == "true"


_VALUES: dict[str | None, Callable[[str], Any]] = {
    "string": str,
    "boolean": _is_true,
    "float": float,
    "double": float,
}


class _Seen(NamedTuple):
    """What an estimator has learned of rows."""

    table: TableColumns
    inputs: list[str]
    outputs: int
    labels: list[str]
    scales: list[list[float]]  # of a regressor's labels: mean and standard deviation of each
    edges: list[list[float]]  # The edges of the bins of each column of numbers.
    rows: int = 0  # The number of rows that train.
    held_out: int = 0
    constants: tuple[str, ...] = ()  # Columns of numbers that are the same in all rows that train.


class TabularEstimator(LearningEstimator):
    """Base class of estimators that take the columns of a table as they are."""

    _task_settings = TABLES
    _learns_from = _LEARNS_FROM
    _searched = {
        "moduleParams.dropout": [0.1, 0.25],
        "moduleParams.hidden": [[256, 128], [128, 128, 64]],
        "moduleParams.number_width": [8],
        "optimizerParams.weight_decay": [0.1],
    }
    _searched_rates = (0.3, 2.0)
    _hint_of_labels = "TabularClassifier learns classes, such as texts"
    _ema_decay: float | None = 0.99
    _seen: _Seen | None = None

    @property
    def _network(self) -> dict[str, Any]:
        """Returns what the network is told of the rows, once they were seen, by the names of its parameters."""
        assert self._seen is not None
        table, scales, p = self._seen.table, self._seen.scales, Values(self)
        found: dict[str, Any] = {"cardinalities": table.cardinalities, "numbers": table.width}
        found |= {"outputs": self._seen.outputs, "edges": self._seen.edges, **network_settings(self._seen.rows)}
        if p["trainingStep"] is not None:
            found["members"] = 1  # A user's step expects one output for each row.
        return found | ({"scales": scales} if self._task == "regression" else {})

    def completed(self) -> Self:
        """Returns a copy with the Params that follow from the rows, once they were seen: inputs and network."""
        module = Values(self)["module"] or TableNetwork
        that = super().completed().copy()._set(module=module)
        if self._seen is None:
            return that
        made_by = load_object(module) if isinstance(module, str) else module
        built = isinstance(made_by, nn.Module | TorchModelBase)
        takes = () if built else inspect.signature(made_by).parameters
        params = {name: value for name, value in self._network.items() if name in takes} | self.getModuleParams()
        that._set(inputCols=self._seen.inputs, preprocess=self._seen.table, moduleParams=params)
        if Values(that).source in TABLE_NETWORK:
            that._set(**self._optimizer(self._seen))
            # Fewer steps than automatic epochs take would leave the average near the first weights.
            if Values(self)["epochs"] == "auto" and not Values(self).is_asynchronous:
                that._setDefault(emaDecay=self._ema_decay)
        return that

    def _optimizer(self, seen: _Seen) -> dict[str, Any]:
        """Returns the optimizer, which pulls the vectors of categories towards zero, unless the user has set one.

        A penalty on these vectors is added to the loss of all rows. A category of many rows outweighs it; a rare one
        stays near zero, which is an average category, as a random effect of a mixed model does. Adam adds such a
        penalty to gradients, as "coupled" weight decay; all other parameters have the decoupled one of AdamW.
        """
        p = Values(self)
        rows = seen.rows if self._sample is None else self._sample.trained
        rows //= p.rows_are_divided_by
        if not (rows and seen.table.cardinalities) or any(map(p.is_set, _WITHOUT_PENALTY)):
            return {}
        columns = seen.table.known
        of_numbers = [f"embeddings.{index}.*" for index, name in enumerate(columns) if name in seen.table.numbers]
        of_others = ["embeddings.*"] if len(of_numbers) < len(columns) else []  # The first group that matches holds.
        unit = self._unit_of_loss(seen)
        # The gradient of a square is twice the weight.
        groups = [
            {"params": patterns, "weight_decay": 2 * penalty * unit / rows, "decoupled_weight_decay": False}
            for patterns, penalty in ((of_numbers, _NUMBER_PENALTY), (of_others, _CATEGORY_PENALTY))
            if patterns
        ]
        options = {"weight_decay": _WEIGHT_DECAY, "decoupled_weight_decay": True, **p["optimizerParams"]}
        return {"optimizer": "Adam", "optimizerParams": options, "parameterGroups": groups}

    def _unit_of_loss(self, seen: _Seen) -> float:
        """Returns about what the loss of a row is when the label's mean is predicted; 1 of classes and of grades."""
        trained = Values(self).trained
        scales = seen.scales or (trained.params.get("scales", ()) if trained is not None else ())
        deviations = [deviation or 1.0 for _, deviation in scales]
        if self._task != "regression" or self._grades or not deviations:
            return 1.0
        power = 2 if _is_squared_error(Values(self)["loss"]) else 1  # Others grow about as the absolute error does.
        return sum(deviation**power for deviation in deviations) / len(deviations)

    @property
    def _needs_count(self) -> bool:
        return super()._needs_count or Values(self).trained is not None  # Nothing else counts rows where it goes on.

    def _learn(self, dataset: DataFrame) -> _Seen:
        trained = Values(self).trained
        if trained is not None and isinstance(trained.preprocess, TableColumns):  # it goes on with what it knows
            return _Seen(trained.preprocess, [spec.column for spec in trained.inputs], 0, list(trained.labels), [], [])
        return _seen_in(self._without_dropped(dataset), self)

    def _count(self, rows: DataFrame) -> tuple[int, int]:
        seen = self._seen
        return (seen.rows, seen.held_out) if seen is not None and seen.rows else super()._count(rows)

    def _chosen(self) -> dict[str, Any]:
        found, p, scales = super()._chosen(), Values(self), [] if self._seen is None else self._seen.scales
        weighed = p["weightCol"] or p["trainingStep"] is not None
        if scales and p.validated and self._task == "regression" and _is_squared_error(p["loss"]) and not weighed:
            found["baseline"] = {"val_loss": sum(deviation**2 for _, deviation in scales) / len(scales)}
        return found

    def _contents(self, names: ColumnNames) -> Sequence[str]:
        p = Values(self)
        inputs = p["inputCols"] or [name for name in names.schema.names if not _DRAWN.search(name)]
        return [*inputs, *self._needed(names)]

    def _needed(self, names: ColumnNames) -> Sequence[str]:
        return Values(self)["labelCols"] or [self.getLabelCol()]

    def _arranged(self, dataset: DataFrame) -> DataFrame:
        """Returns the rows with a label of strings or booleans as the index of its class; -1 if it is none of these."""
        if self._seen is None:
            return dataset
        _warn_of_constants(self._seen)
        column, labels = self.getLabelCol(), self._seen.labels
        if self._task != "classification" or not labels:
            return dataset
        index = class_index(dataset, column, labels)
        # withMetadata would read a dot as that of a field; a field becomes a column, which is found before it.
        return dataset.withColumn(column, index.alias(column, metadata=nominal(len(labels), labels)))


def _seen_in(dataset: DataFrame, estimator: TabularEstimator) -> _Seen:
    """Returns what one job learns of the rows that train."""
    p, names = Values(estimator), ColumnNames.of(dataset)
    if estimator._task == "regression":
        _check_numbers_to_predict(names, p["labelCols"] or [p["labelCol"]], estimator)
    categorical, times, numeric = _by_kind(p, names)
    label = p["labelCol"] if estimator._task == "classification" else ""
    kind = names.type_of(label) if label else None
    named = [label] if isinstance(kind, T.StringType) else []
    predicted = [] if label else [name for name in p["labelCols"] or [p["labelCol"]] if _is_number(names.type_of(name))]
    labelled = [label] if isinstance(kind, NUMERIC) else predicted
    numbers = [names.column(name).cast("double") for name in numeric] + [names.column(name) for name in times]
    predicted_numbers = [names.column(name).cast("double") for name in labelled]
    validates = names.column(p["validationIndicatorCol"]) if p["validationIndicatorCol"] else F.lit(False)

    integers = {name for name in numeric if isinstance(names.type_of(name), T.IntegralType)}
    coded = p["categoricalCols"] is None and p["numericCols"] is None
    most_codes = p["maxIntegerCategories"] + 1 if coded and len(integers) <= _MOST_CODED else 0
    # Labels are those of all rows where the estimator holds some of them out itself.
    automatic = bool(estimator._marks)
    texts = [
        names.column(name).cast(str(kept_as(names.type_of(name)))).cast("string") for name in (*categorical, *named)
    ]
    values, found = categories_and_figures(
        dataset,
        [
            *(F.when(~validates, text) for text in texts),
            *(F.when(validates, text) for text in texts[len(categorical) :]),
        ],
        [
            *(F.when(~validates, number) for number in numbers),
            *(F.when(F.lit(True) if label and automatic else ~validates, number) for number in predicted_numbers),
            *(F.when(marks, F.lit(1.0)) for marks in (~validates, validates)),
        ],
        limited=len(categorical),
        distinct=[max(MOST_VALUES, most_codes) if name in integers else MOST_VALUES for name in (*numeric, *times)],
        most=p["maxCategories"],
        labels=_MOST_LABELS + 1,
    )
    *found, trained_rows, held_out = found
    rows = trained_rows.rows
    check_rows(rows + held_out.rows * automatic)
    categories = {}
    for name, counts in zip(categorical, values, strict=False):
        value_of = _VALUES.get(kept_as(names.type_of(name)), int)
        categories[name] = [value_of(text) for text, count in counts.items() if count >= p["minCount"]]
    of_numbers = dict(zip((*numeric, *times), found, strict=False))
    if coded:
        categories |= _coded(of_numbers, names, p["maxIntegerCategories"], p["minCount"])
    scales = [[_rounded(of.mean), _rounded(of.deviation)] for of in found[len(of_numbers) :]]
    missing = [name for name in numeric if 0 < of_numbers[name].rows < rows and name not in categories]
    constants = [name for name, of in of_numbers.items() if of.smallest == of.largest and name not in missing]
    trained, validated = map(list, values[len(categorical) :]) if named else ([], [])
    labels = _labels(label, sorted({*trained, *validated}) if automatic else trained, validated) if named else []
    if isinstance(kind, T.BooleanType):
        labels = ["false", "true"]
    outputs = len(labels) or len(p["labelCols"] or ()) or 1
    if label and not labels:
        outputs = classes_of(dataset, label) or _classes(label, found[-1])
    if label and (outputs < 2 or (not labels and found[-1].smallest == found[-1].largest)):
        hint = "a classifier learns to tell two or more apart"
        raise ColumnError(
            f"column {label!r} has the same label in all rows that train", hint=hint, column=label, code="ST-ONE-LABEL"
        )
    known = {*categorical, *times, *numeric}
    order = [*(p["inputCols"] or names.schema.names), *(p["categoricalCols"] or ()), *(p["numericCols"] or ())]
    inputs = [name for name in dict.fromkeys(order) if name in known]
    centres = {name: [*of.distribution.centre_and_scale(_rounded(of.deviation))] for name, of in of_numbers.items()}
    edges = [scaled_edges(of.distribution.edges(BINS), centres[name], _BOUND) for name, of in of_numbers.items()]
    table = TableColumns(categories, times, centres, missing, _BOUND)
    return _Seen(table, inputs, outputs, labels, scales, edges, rows, held_out.rows, tuple(constants))


def _check_numbers_to_predict(names: ColumnNames, labels: Iterable[str], estimator: TabularEstimator) -> None:
    """Refuses labels that are no numbers, such as texts, before there is a job."""
    for name in labels:
        kind = names.type_of(name)
        if not (isinstance(kind, NUMERIC) or is_numeric(kind)):
            hint = estimator._hint_of_labels
            if isinstance(kind, T.StringType):
                hint += f"; numbers as text: cast({names.sql(name)} as double)"
            raise unsuitable(kind, name, "", hint, must=f"a number for {type(estimator).__name__}")


def _warn_of_constants(seen: _Seen) -> None:
    """Names columns of numbers from which nothing can be learned, and says where all labels are the same."""
    if seen.constants:
        listed = ", ".join(map(repr, seen.constants))
        logger.warning("the same number, or null, in all rows that train, and so without effect: %s", listed)
    if seen.rows and any(deviation == 0 for _, deviation in seen.scales):
        logger.warning("the label is the same in all rows that train, and so is what the model will predict")


def _coded(figures: Mapping[str, Figures], names: ColumnNames, most: int, least: int) -> dict[str, list[int]]:
    """Returns the whole numbers of columns that are categories, too: months and codes, but also identifiers.

    Of a range of a few numbers, all are categories; of at most `most` distinct ones, those that `least` rows have,
    unless the table has very many such columns. None are in a column whose numbers hardly repeat, or with one beyond
    2**53, which doubles do not tell apart.
    """
    found = {}
    integers = {name: of for name, of in figures.items() if isinstance(names.type_of(name), T.IntegralType)}
    for name, of in integers.items() if most else ():
        if max(-of.smallest, of.largest) >= _LARGEST_CODE:
            continue
        values, counts = of.distribution.values, of.distribution.weights
        codes: Sequence[int] = range(int(of.smallest), int(of.largest) + 1)
        if len(codes) > min(most, _FEW_INTEGERS):
            repeated = of.distribution.whole and len(values) <= min(most, of.rows // _FEWEST_ROWS_OF_CODE)
            measured = len(values) > _FEW_INTEGERS and len(integers) > _MOST_CODED
            pairs = zip(values, counts, strict=True) if repeated and not measured else ()
            codes = [int(value) for value, count in pairs if count >= least]
        if len(codes) > 2:
            found[name] = list(codes)
    return found


def _labels(column: str, trained: list[str], validated: list[str]) -> list[str]:
    """Returns the labels of the rows that train; refuses others in the rows that validate, and too many."""
    what, hint = "", ""
    if len(trained) > _MOST_LABELS:
        what = f"has more than {_MOST_LABELS:,} labels"
        hint = "a classifier has an output for each: does labelCol name identifiers, or numbers as text?"
    elif unseen := {*validated} - {*trained}:
        what = f"has the label {min(unseen)!r} in validation rows, and in no row that trains"
        hint = "let rows with it train, or leave them out"
    if what:
        raise ColumnError(f"column {column!r} {what}", hint=hint, column=column)
    return sorted(trained)


def _classes(column: str, figures: Figures) -> int:
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


def _by_kind(p: Values, names: ColumnNames) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Returns the columns of categories, of times with the parts that are taken, and of numbers."""
    roles = [role for name in _ROLES for role in ([p[name]] if isinstance(p[name], str) else p[name] or ())]
    taken = {column for role in roles for column in names.called(role)}
    free = [name for name in names.schema.names if name not in taken and not _DRAWN.search(name)]
    named = _by_column(names, [*(p["categoricalCols"] or ()), *(p["numericCols"] or ())])
    inputs = _by_column(names, p["inputCols"] or ())
    rest = [name for column, name in (inputs or _by_column(names, free)).items() if column not in named]
    labels = _by_column(names, p["labelCols"] or [p["labelCol"]])
    numbers = [name for name in rest if _is_number(names.type_of(name))]
    numeric = numbers if p["numericCols"] is None else p["numericCols"]
    others = [name for name in rest if name not in numbers]
    others = others if p["categoricalCols"] is None else p["categoricalCols"]
    used = _by_column(names, [*numeric, *others])
    for wrong, what, hint in (
        (
            _without(named, inputs) if inputs else [],
            "column {!r} is not among inputCols",
            "name it there, or leave that out",
        ),
        (
            [name for column, name in labels.items() if column in {**inputs, **named}],
            "the label {!r} is among the input columns",
            "leave it out: a model would only repeat it",
        ),
        (
            _without(inputs, used),
            "column {!r} is among inputCols, and in neither categoricalCols nor numericCols",
            "name it in one of them, or leave it out of inputCols",
        ),
    ):
        if wrong:
            raise ColumnError(what.format(min(wrong)), hint=hint, column=min(wrong))
    categorical, times = [], {}
    for name in others:
        kind = names.type_of(name)
        if isinstance(kind, _TIMES):
            times[name] = ["month", "weekday"] if isinstance(kind, T.DateType) else ["month", "weekday", "hour"]
        elif isinstance(kind, (T.StringType, *NUMERIC)):
            categorical.append(name)
        else:
            hint = "leave it out: inputCols names the columns to take"
            what = f"column {name!r} is {kind.simpleString()}, neither text, number, boolean, date nor timestamp"
            raise ColumnError(what, hint=hint, column=name)
    check_numbers(names, numeric)
    if not (categorical or times or numeric):
        hint = "its other columns are the inputs: text, numbers, booleans, dates and timestamps"
        raise ColumnError("the table has no column but the label and those that have another role", hint=hint)
    return categorical, times, numeric


def _by_column(names: ColumnNames, of: Iterable[str]) -> dict[str, str]:
    """Returns names by the columns that they stand for: the first of each."""
    by_column: dict[str, str] = {}
    for name in of:
        by_column.setdefault(names.sql(name), name)
    return by_column


def _without(some: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    return [name for column, name in some.items() if column not in others]


def _is_squared_error(loss: Any) -> bool:
    """Whether a loss is torch's `MSELoss`, by whatever name."""
    return isinstance(loss, nn.MSELoss) or loss in ("MSELoss", "torch.nn:MSELoss", nn.MSELoss)


def _is_number(kind: T.DataType) -> bool:
    return isinstance(kind, NUMERIC) and not isinstance(kind, T.BooleanType)


def _rounded(value: float) -> float:
    """Returns a number without its last digits, which depend on the order in which Spark has added up."""
    return float(f"{value:.8g}")


class TabularModel(TorchModelBase):
    """Base class of the models of tables."""

    @property
    def categories(self) -> dict[str, list[Any]]:
        """The known categories of each column of the tensor `categories`, from index 2 on."""
        table = self.trained.preprocess
        return table.known if isinstance(table, TableColumns) else {}


class TabularClassificationModel(TabularModel, TorchClassificationModel):
    """A classifier fitted by `TabularClassifier`; `labels` are the labels of its classes, if they are no numbers."""


class TabularClassifier(TabularEstimator, TorchClassifier, TabularClassifierParams):
    """Trains a classifier on the columns of a table as they are: strings, booleans, numbers, dates and timestamps.

    All columns but the label and those that other Params name are inputs. Labels are strings, booleans, or whole
    numbers `0 ... classes - 1`. By default, it trains a multilayer perceptron with embeddings.

    Example:
        >>> rows = [("ab"[i % 2], 100 * i, "late" if i % 2 else "on time") for i in range(40)]
        >>> flights = spark.createDataFrame(rows, "carrier string, distance int, arrival string")
        >>> quick = {"batchSize": 10, "learningRate": 0.01, "progress": False}
        >>> model = TabularClassifier(labelCol="arrival", epochs=10, **quick).fit(flights)
        >>> model.labels, model.categories
        (['late', 'on time'], {'carrier': ['a', 'b']})
        >>> model.evaluate(flights).accuracy
        1.0

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _model_class = TabularClassificationModel


class TabularRegressionModel(TabularModel, TorchRegressionModel):
    """A regressor fitted by `TabularRegressor`."""


class TabularRegressor(TabularEstimator, TorchRegressor, TabularRegressorParams):
    """Trains a regressor on the columns of a table as they are: strings, booleans, numbers, dates and timestamps.

    All columns but the label and those that other Params name are inputs. By default, it trains a multilayer perceptron
    with embeddings.

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _model_class = TabularRegressionModel
