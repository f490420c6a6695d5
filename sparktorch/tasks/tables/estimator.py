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
from sparktorch.tasks.tables.kinds import DRAWN, ROLES
from sparktorch.tasks.tables.learned import LearnedTable, learn_table, warn_of_constants
from sparktorch.tasks.tables.network import TableNetwork, network_settings
from sparktorch.tasks.tables.params import TABLE, TabularClassifierParams, TabularRegressorParams
from sparktorch.tasks.tables.preprocess import TableColumns

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    *("TABLES", "TabularClassificationModel", "TabularClassifier", "TabularEstimator", "TabularModel"),
    *("TabularRegressionModel", "TabularRegressor"),
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

_LEARNS_FROM = (*ROLES, *(spec.name for spec in TABLE), "inputCols")
# The weight, in units of the loss of a row, of the squared vector of a category, and of a number that is one as well:
# the number itself says most of it already. Both were chosen on the development tables of the benchmark.
_CATEGORY_PENALTY = 1.0
_NUMBER_PENALTY = 30.0
_WEIGHT_DECAY = 0.01  # AdamW has this one by default.
# The Params that the penalty would not suit: one of the optimizer's, and what clips the gradients of the loss alone.
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
    def _network(self) -> dict[str, Any]:
        """Returns what the network is told of the rows, once they were seen, by the names of its parameters."""
        assert self._learned is not None
        learned = self._learned
        settings: dict[str, Any] = {
            "cardinalities": learned.table.cardinalities,
            "numbers": learned.table.width,
            "outputs": learned.outputs,
            "edges": learned.edges,
            **network_settings(learned.rows),
        }
        if Values(self)["trainingStep"] is not None:
            settings["members"] = 1  # A user's step expects one output for each row.
        if self._task == "regression":
            settings["scales"] = learned.scales
        return settings

    def completed(self) -> Self:
        """Returns a copy with the Params that follow from the rows, once they were seen: inputs and network."""
        module = Values(self)["module"] or TableNetwork
        estimator = super().completed().copy()._set(module=module)
        if self._learned is None:
            return estimator
        made_by = load_object(module) if isinstance(module, str) else module
        built = isinstance(made_by, nn.Module | TorchModelBase)
        parameters = () if built else inspect.signature(made_by).parameters
        params = {name: value for name, value in self._network.items() if name in parameters} | self.getModuleParams()
        estimator._set(inputCols=self._learned.inputs, preprocess=self._learned.table, moduleParams=params)
        if is_object(Values(estimator).source, TableNetwork):
            estimator._set(**self._optimizer(self._learned))
            # Fewer steps than automatic epochs take would leave the average near the first weights.
            if Values(self)["epochs"] == "auto" and not Values(self).is_asynchronous:
                estimator._setDefault(emaDecay=self._ema_decay)
        return estimator

    def _optimizer(self, learned: LearnedTable) -> dict[str, Any]:
        """Returns the optimizer, which pulls the vectors of categories towards zero, unless the user has set one.

        A penalty on these vectors is added to the loss of all rows. A category of many rows outweighs it; a rare one
        stays near zero, which is an average category, as a random effect of a mixed model does. Adam adds such a
        penalty to gradients, as "coupled" weight decay; all other parameters have the decoupled one of AdamW.
        """
        p = Values(self)
        rows = learned.rows if self._sample is None else self._sample.trained
        rows //= p.rows_are_divided_by
        if not (rows and learned.table.cardinalities) or any(map(p.is_set, _WITHOUT_PENALTY)):
            return {}
        columns = learned.table.vocabulary
        of_numbers = [f"embeddings.{index}.*" for index, name in enumerate(columns) if name in learned.table.numbers]
        of_others = ["embeddings.*"] if len(of_numbers) < len(columns) else []  # The first group that matches holds.
        unit = self._unit_of_loss(learned)
        # The gradient of a square is twice the weight.
        groups = [
            {"params": patterns, "weight_decay": 2 * penalty * unit / rows, "decoupled_weight_decay": False}
            for patterns, penalty in ((of_numbers, _NUMBER_PENALTY), (of_others, _CATEGORY_PENALTY))
            if patterns
        ]
        options = {"weight_decay": _WEIGHT_DECAY, "decoupled_weight_decay": True, **p["optimizerParams"]}
        return {"optimizer": "Adam", "optimizerParams": options, "parameterGroups": groups}

    def _unit_of_loss(self, learned: LearnedTable) -> float:
        """Returns about what the loss of a row is when the label's mean is predicted; 1 of classes and of grades."""
        trained = Values(self).trained
        scales = learned.scales or (trained.params.get("scales", ()) if trained is not None else ())
        deviations = [deviation or 1.0 for _, deviation in scales]
        if self._task != "regression" or self._task_training().graded or not deviations:
            return 1.0
        power = 2 if _is_squared_error(Values(self)["loss"]) else 1  # Others grow about as the absolute error does.
        return sum(deviation**power for deviation in deviations) / len(deviations)

    @property
    def _needs_count(self) -> bool:
        return super()._needs_count or Values(self).trained is not None  # Nothing else counts rows where it goes on.

    def _learn(self, dataset: DataFrame) -> LearnedTable:
        trained = Values(self).trained
        if trained is not None and isinstance(trained.preprocess, TableColumns):
            # The training goes on with what the fitted model has learned.
            inputs = [spec.column for spec in trained.inputs]
            return LearnedTable(trained.preprocess, inputs, 0, list(trained.labels), [], [])
        return learn_table(self._without_dropped(dataset), self)

    def _count(self, rows: DataFrame) -> tuple[int, int]:
        learned = self._learned
        return (learned.rows, learned.held_out) if learned is not None and learned.rows else super()._count(rows)

    def _chosen(self) -> dict[str, Any]:
        fields, p, scales = super()._chosen(), Values(self), [] if self._learned is None else self._learned.scales
        weighed = p["weightCol"] or p["trainingStep"] is not None
        if scales and p.validated and self._task == "regression" and _is_squared_error(p["loss"]) and not weighed:
            fields["baseline"] = {"val_loss": sum(deviation**2 for _, deviation in scales) / len(scales)}
        return fields

    def _distinguishing_columns(self, names: ColumnNames) -> Sequence[str]:
        p = Values(self)
        inputs = p["inputCols"] or [name for name in names.schema.names if not DRAWN.search(name)]
        return [*inputs, *self._required_columns(names)]

    def _required_columns(self, names: ColumnNames) -> Sequence[str]:
        return Values(self)["labelCols"] or [self.getLabelCol()]

    def _training_rows(self, dataset: DataFrame) -> DataFrame:
        """Returns the rows with a label of strings or booleans as the index of its class; -1 if it is none of these."""
        if self._learned is None:
            return dataset
        warn_of_constants(self._learned)
        column, labels = self.getLabelCol(), self._learned.labels
        if self._task != "classification" or not labels:
            return dataset
        index = class_index(dataset, column, labels)
        # withMetadata would read a dot as that of a field; a field becomes a column, which is found before it.
        return dataset.withColumn(column, index.alias(column, metadata=nominal(len(labels), labels)))


def _is_squared_error(loss: Any) -> bool:
    """Whether a loss is torch's `MSELoss`, by whatever name."""
    return isinstance(loss, nn.MSELoss) or loss in ("MSELoss", "torch.nn:MSELoss", nn.MSELoss)


class TabularModel(TorchModelBase):
    """Base class of the models of tables."""

    @property
    def categories(self) -> dict[str, list[Any]]:
        """The known categories of each column of the tensor `categories`, from index 2 on."""
        table = self.trained.preprocess
        return table.vocabulary if isinstance(table, TableColumns) else {}


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
