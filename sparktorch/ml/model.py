"""The fitted models: Transformers that score with the trained module."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparktorch.artifact import TrainedModule
from sparktorch.config import Device, Precision
from sparktorch.errors import ColumnError, ConfigError, nearest
from sparktorch.ml.io import ModelReader, ModelWriter
from sparktorch.ml.params import SCORING_DEFAULTS, OutputColumns, ScoringParams
from sparktorch.ml.summary import TrainingSummary
from sparktorch.ml.translate import check_scoring, input_names
from sparktorch.spark.predict import Scoring, result_column, rows_for_udf, scoring_udf
from sparktorch.spark.wire import input_columns, quoted_name

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TorchModel", "TorchModelBase"]


class TorchModelBase(Model, ScoringParams, MLReadable[Any], MLWritable):
    """What all the fitted models share.

    A model comes from `fit` or `load`; one that is constructed by hand holds no module.
    """

    _trained: TrainedModule | None = None
    _summary: TrainingSummary | None = None

    def __init__(self) -> None:
        """Makes a model without a module, for `load` to fill."""
        super().__init__()
        self._setDefault(featuresCol="features", predictionCol="prediction", **SCORING_DEFAULTS)

    def _with(self, trained: TrainedModule, summary: TrainingSummary | None) -> Self:
        self._trained = trained
        self._summary = summary
        return self

    @property
    def trained(self) -> TrainedModule:
        """The trained module as a value: code, weights, inputs and outputs.

        Raises:
            ConfigError: The model was constructed by hand.
        """
        if self._trained is None:
            raise ConfigError(f"this {type(self).__name__} holds no module", hint="get one from fit() or load()")
        return self._trained

    @property
    def module(self) -> nn.Module:
        """The plain `nn.Module` with its trained weights, in evaluation mode, on the CPU; a fresh copy."""
        return self.trained.build()

    @property
    def hasSummary(self) -> bool:
        """Whether the course of the training is known."""
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """The course of the training.

        Raises:
            ConfigError: It is not known.
        """
        if self._summary is None:
            raise ConfigError("this model has no training summary")
        return self._summary

    def _transform(self, dataset: DataFrame) -> DataFrame:
        fields, outputs = self._fields()
        taken = [name for name in outputs if name in dataset.columns]
        if taken:
            raise ColumnError(
                f"the DataFrame already has a column {taken[0]!r}",
                hint="drop it, or name the model's output columns otherwise",
                column=taken[0],
            )
        inputs = self._inputs()
        columns = input_columns(dataset, inputs)
        scored = f"__{self.uid}"
        struct = scoring_udf(dataset.sparkSession, self.trained, fields, self._scoring())(*columns)
        results = [result_column(F.col(scored), f, fields[f]).alias(name) for name, f in outputs.items()]
        rows = rows_for_udf(dataset, quoted_name((*inputs[0].sources, inputs[0].column)[0]))
        return rows.withColumn(scored, struct).select(*map(quoted_name, dataset.columns), *results)

    def registerUDF(self, name: str, outputCol: str | None = None) -> None:
        """Registers the model with the active session as an SQL function, `SELECT name(features) FROM ...`.

        It takes one argument per input column, of any type that the model could have been fitted on,
        and returns what `transform` adds as `outputCol`, vectors as arrays.

        Args:
            name: The function's name.
            outputCol: One of the model's output columns; by default `predictionCol`, or the first one.

        Raises:
            ConfigError: The model has no such output column, or there is no active session.
        """
        spark = SparkSession.getActiveSession()
        if spark is None:
            raise ConfigError("there is no active Spark session", hint="start one with SparkSession.builder")
        fields, outputs = self._fields()
        column = outputCol or (self.getPredictionCol() if self.getPredictionCol() in outputs else next(iter(outputs)))
        if column not in outputs:
            raise ConfigError(
                f"the model has no output column {column!r}", hint=nearest(column, outputs), param="outputCol"
            )
        field = outputs[column]
        udf = scoring_udf(spark, self.trained, {field: fields[field]}, self._scoring(), struct=False)
        spark.udf.register(name, udf)

    def _scoring(self) -> Scoring:
        """Returns the Params that say how to score.

        Raises:
            ConfigError: One of them is out of range.
        """
        check_scoring(self)
        return Scoring(
            batch_size=self.getPredictBatchSize(),
            device=cast(Device, self.getDevice()),
            precision=cast(Precision, self.getPredictPrecision()),
            compiled=self.getPredictCompile(),
            keep_null=self.getHandleInvalid() == "keep",
        )

    def _inputs(self) -> list[Any]:
        """Returns the input specs under the columns that the Params name now."""
        specs = self.trained.inputs
        names = input_names(self)
        count = sum(len(spec.sources) or 1 for spec in specs)
        if len(names) != count:
            raise ConfigError(f"the model takes {count} input columns, got {names}", param="inputCols")
        rest = iter(names)
        found = []
        for spec in specs:
            sources = tuple(islice(rest, len(spec.sources)))
            found.append(replace(spec, sources=sources) if sources else replace(spec, column=next(rest)))
        return found

    def _fields(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the type of each field to score, as SQL or "vector", and the field of each output column."""
        raise NotImplementedError

    def write(self) -> ModelWriter:
        """Returns a writer; `option("allowPickle", "true")` admits a module without import path."""
        return ModelWriter(self)

    def save(self, path: str) -> None:
        """Saves the model, a shortcut of `write().save(path)`."""
        self.write().save(path)

    @classmethod
    def read(cls) -> ModelReader[Any]:
        """Returns a reader; `option("allowPickle", "true")` admits a pickled module."""
        return ModelReader(cls)

    @classmethod
    def load(cls, path: str) -> Any:
        """Loads a model, a shortcut of `read().load(path)`."""
        return cls.read().load(path)


class TorchModel(TorchModelBase, OutputColumns):
    """A module fitted by `TorchEstimator`.

    `transform` adds its output as `predictionCol`: float for one value a row, (nested) arrays of
    float otherwise; several outputs go under `outputCols`, in the order `forward` returns them.
    """

    def _fields(self) -> tuple[dict[str, str], dict[str, str]]:
        specs = self.trained.outputs
        if len(specs) == 1:
            return {"prediction": _sql_type(specs[0].shape)}, {self.getPredictionCol(): "prediction"}
        names = self.getOutputCols() if self.isDefined("outputCols") else []
        if len(names) != len(specs):
            raise ConfigError(
                f"the module returns {len(specs)} tensors ({', '.join(spec.name for spec in specs)}), "
                f"outputCols names {len(names)}",
                hint="set outputCols, one name per tensor",
                param="outputCols",
            )
        fields = {spec.name: _sql_type(spec.shape) for spec in specs}
        return fields, dict(zip(names, fields, strict=True))


def _sql_type(shape: tuple[int, ...]) -> str:
    return "array<" * len(shape) + "float" + ">" * len(shape)
