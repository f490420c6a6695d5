"""Estimators of tables as they are: columns of strings, booleans, numbers, dates and timestamps."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from torch import nn

from sparktorch.base.imports import is_object, load_object
from sparktorch.ml.classification import TorchClassificationModel, TorchClassifier
from sparktorch.ml.fit.values import Values
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.regression import TorchRegressionModel, TorchRegressor
from sparktorch.ml.scoring.column_metadata import class_index, nominal
from sparktorch.spark.column_names import ColumnNames
from sparktorch.tasks.shared.estimator import LearningEstimator
from sparktorch.tasks.shared.settings import TaskSettings
from sparktorch.tasks.tables.kinds import CROSS_VALIDATION_COLUMN, ROLE_PARAMS
from sparktorch.tasks.tables.learned import LearnedTable, learn_table, warn_of_constants
from sparktorch.tasks.tables.network import TableNetwork, network_settings
from sparktorch.tasks.tables.params import TABLE, TabularClassifierParams, TabularRegressorParams
from sparktorch.tasks.tables.preprocess import TableColumns

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "TABLES",
    "TabularClassificationModel",
    "TabularClassifier",
    "TabularEstimator",
    "TabularModel",
    "TabularRegressionModel",
    "TabularRegressor",
]

TABLES = TaskSettings(
    learning_rate=3e-3,
    scheduler="CosineAnnealingLR",
    patience_steps=400,
    least_patience=6,
    most_epochs=80,
    least_epochs=6,
    rows_in_all=1_000_000,
)

_LEARNS_FROM = (*ROLE_PARAMS, *(spec.name for spec in TABLE), "inputCols")
# The weights of the penalty on the squared vector of a category, in units of the loss of a row. A category that is also
# an input as a number has the larger weight: the number itself says most already. Both weights were chosen on the
# development tables of the benchmark.
_CATEGORY_PENALTY = 1.0
_NUMBER_PENALTY = 30.0
_WEIGHT_DECAY = 0.01  # This is the default of AdamW.
# Where one of these Params is set, there is no penalty: users who choose an optimizer choose its weight decay, and the
# penalty's gradients are not clipped.
_WITHOUT_PENALTY = ("optimizer", "parameterGroups", "freeze", "gradientClipNorm", "gradientClipValue")


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
    _learned: LearnedTable | None = None

    @property
    def _network_arguments(self) -> dict[str, Any]:
        """The arguments of the network that follow from what was learned from the rows."""
        learned = self._learned
        assert learned is not None
        arguments: dict[str, Any] = {
            "cardinalities": learned.table.cardinalities,
            "numbers": learned.table.width,
            "outputs": learned.outputs,
            "edges": learned.edges,
            **network_settings(learned.rows),
        }
        if Values(self)["trainingStep"] is not None:
            arguments["members"] = 1  # A user's step expects one output for each row.
        if self._task == "regression":
            arguments["scales"] = learned.scales
            is_custom_step = Values(self)["trainingStep"] is not None
            if learned.nonnegative and not is_custom_step and _predicts_label(Values(self)["loss"]):
                # A price or a count below 0 is wrong in any case, and 0 is nearer to every label.
                arguments["nonnegative"] = list(learned.nonnegative)
        return arguments

    def completed(self) -> Self:
        """Returns a copy with the Params that follow from what it has learned from the rows: inputs and network."""
        module = Values(self)["module"] or TableNetwork
        estimator = super().completed().copy()._set(module=module)
        if self._learned is None:
            return estimator
        factory = load_object(module) if isinstance(module, str) else module
        is_instance = isinstance(factory, nn.Module | TorchModelBase)
        accepted = () if is_instance else inspect.signature(factory).parameters
        arguments = {name: value for name, value in self._network_arguments.items() if name in accepted}
        params = arguments | self.getModuleParams()
        estimator._set(inputCols=self._learned.inputs, preprocess=self._learned.table, moduleParams=params)
        if is_object(Values(estimator).source, TableNetwork):
            estimator._set(**self._optimizer_params(self._learned))
            # With fewer steps than automatic epochs take, the moving average would stay near the first weights.
            if Values(self)["epochs"] == "auto" and not Values(self).is_asynchronous:
                estimator._setDefault(emaDecay=self._ema_decay)
        return estimator

    def _optimizer_params(self, learned: LearnedTable) -> dict[str, Any]:
        """Returns Params for an optimizer that pulls the vectors of categories towards zero.

        It returns none if the user has set a Param that such a penalty would not suit.

        The penalty is added to the loss of all rows. The loss of a frequent category outweighs it. The vector of a rare
        category stays near zero, where an average category is, as a random effect of a mixed model does. Adam adds the
        penalty to the gradients, as "coupled" weight decay; all other parameters have AdamW's decoupled decay.
        """
        p = Values(self)
        rows = learned.rows if self._sample is None else self._sample.trained
        rows //= p.rows_are_divided_by
        if not (rows and learned.table.cardinalities) or any(map(p.is_set, _WITHOUT_PENALTY)):
            return {}
        columns = learned.table.vocabulary
        number_patterns = [
            f"embeddings.{index}.*" for index, name in enumerate(columns) if name in learned.table.numbers
        ]
        # A parameter gets the first group with a matching pattern: this pattern leaves the embeddings of numbers out.
        category_patterns = ["embeddings.*"] if len(number_patterns) < len(columns) else []
        unit = self._unit_of_loss(learned)
        # The gradient of a squared weight is twice the weight.
        groups = [
            {"params": patterns, "weight_decay": 2 * penalty * unit / rows, "decoupled_weight_decay": False}
            for patterns, penalty in ((number_patterns, _NUMBER_PENALTY), (category_patterns, _CATEGORY_PENALTY))
            if patterns
        ]
        options = {"weight_decay": _WEIGHT_DECAY, "decoupled_weight_decay": True, **p["optimizerParams"]}
        return {"optimizer": "Adam", "optimizerParams": options, "parameterGroups": groups}

    def _unit_of_loss(self, learned: LearnedTable) -> float:
        """Estimates the loss of a row whose prediction is the mean of the labels; 1 for classes and for grades."""
        trained = Values(self).trained
        scales = learned.scales or (trained.params.get("scales", ()) if trained is not None else ())
        deviations = [deviation or 1.0 for _, deviation in scales]
        if self._task != "regression" or self._task_training().graded or not deviations:
            return 1.0
        # Other losses than the squared error grow about as the absolute error does.
        power = 2 if _is_squared_error(Values(self)["loss"]) else 1
        return sum(deviation**power for deviation in deviations) / len(deviations)

    @property
    def _needs_count(self) -> bool:
        # A training that goes on from a fitted model learns nothing from the rows, and so has not counted them.
        return super()._needs_count or Values(self).trained is not None

    def _learn(self, dataset: DataFrame) -> LearnedTable:
        trained = Values(self).trained
        if trained is not None and isinstance(trained.preprocess, TableColumns):
            # The training goes on with what the fitted model has learned; its network has outputs, scales and edges.
            return LearnedTable(
                table=trained.preprocess,
                inputs=[spec.column for spec in trained.inputs],
                outputs=0,
                labels=list(trained.labels),
                scales=[],
                edges=[],
            )
        return learn_table(self._without_dropped(dataset), self)

    def _count(self, rows: DataFrame) -> tuple[int, int]:
        if self._learned is None or not self._learned.rows:
            return super()._count(rows)
        return self._learned.rows, self._learned.held_out

    def _chosen(self) -> dict[str, Any]:
        """Returns what was chosen, and the validation loss of predicting the mean where the deviations say it."""
        fields = super()._chosen()
        p = Values(self)
        scales = [] if self._learned is None else self._learned.scales
        is_weighted = p["weightCol"] or p["trainingStep"] is not None
        if scales and p.validated and self._task == "regression" and _is_squared_error(p["loss"]) and not is_weighted:
            fields["baseline"] = {"val_loss": sum(deviation**2 for _, deviation in scales) / len(scales)}
        return fields

    def _distinguishing_columns(self, names: ColumnNames) -> Sequence[str]:
        p = Values(self)
        inputs = p["inputCols"] or [name for name in names.schema.names if not CROSS_VALIDATION_COLUMN.search(name)]
        return [*inputs, *self._required_columns(names)]

    def _required_columns(self, names: ColumnNames) -> Sequence[str]:
        return Values(self)["labelCols"] or [self.getLabelCol()]

    def _training_rows(self, dataset: DataFrame) -> DataFrame:
        """Returns the rows with the index of the class in place of a label that is a string or boolean.

        A label that no class has becomes -1.
        """
        if self._learned is None:
            return dataset
        warn_of_constants(self._learned)
        column = self.getLabelCol()
        labels = self._learned.labels
        if self._task != "classification" or not labels:
            return dataset
        index = class_index(dataset, column, labels)
        # `withMetadata` would take a dot in the name for a path into a struct. If the label is a field of a struct, the
        # new column has the path as its name, and columns are looked up before paths.
        return dataset.withColumn(column, index.alias(column, metadata=nominal(len(labels), labels)))


def _loss_class(loss: Any) -> Any:
    """Returns the class of a loss: of a name or path, only torch's, as the user's may be importable in ranks alone."""
    if isinstance(loss, str):
        if ":" not in loss:
            return getattr(nn, loss, None)
        return load_object(loss) if loss.startswith(("torch.", "torch:")) else None
    return loss if isinstance(loss, type) else type(loss)


def _predicts_label(loss: Any) -> bool:
    """Whether a loss of torch is least where the output is the label itself, and not, say, its logarithm."""
    return _loss_class(loss) in (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


def _is_squared_error(loss: Any) -> bool:
    """Whether a loss is torch's `MSELoss`, by whatever name."""
    return _loss_class(loss) is nn.MSELoss


class TabularModel(TorchModelBase):
    """Base class of the models of tables."""

    @property
    def categories(self) -> dict[str, list[Any]]:
        """The categories that the fit has learned, by column of the tensor `categories`; the first one has index 2."""
        table = self.trained.preprocess
        return table.vocabulary if isinstance(table, TableColumns) else {}


class TabularClassificationModel(TabularModel, TorchClassificationModel):
    """A classifier fitted by `TabularClassifier`. `labels` has the labels of its classes, unless they are numbers."""


class TabularClassifier(TabularEstimator, TorchClassifier, TabularClassifierParams):
    """Trains a classifier on the columns of a table as they are: strings, booleans, numbers, dates and timestamps.

    All columns are inputs but the label and the columns that other Params name. Labels are strings, booleans, or whole
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

    All columns are inputs but the label and the columns that other Params name. By default, it trains a multilayer
    perceptron with embeddings.

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _model_class = TabularRegressionModel
