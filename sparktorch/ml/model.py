"""The fitted models: Transformers that score with the trained module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparktorch.base.config import Invalid, Precision, one_of
from sparktorch.base.imports import load_object
from sparktorch.base.redact import display_text
from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.data.columns import TensorSpec, positions_of
from sparktorch.data.preprocess import LoadedPreprocess
from sparktorch.errors import ConfigError, PersistenceError, shortens
from sparktorch.ml.fit.checks import check_layers, check_outputs, check_scoring, naming_params
from sparktorch.ml.fit.prepared_data import make_room
from sparktorch.ml.fit.summary import TrainingSummary
from sparktorch.ml.fit.values import Values
from sparktorch.ml.from_module import Weights, trained_from
from sparktorch.ml.params.declare import input_names
from sparktorch.ml.params.mixins import GenericModelParams, ModelParams
from sparktorch.ml.persistence import ModelReader, ModelWriter
from sparktorch.ml.scoring import html
from sparktorch.ml.scoring.column_metadata import numeric
from sparktorch.ml.scoring.output_fields import layer_field, output_fields, sql_type
from sparktorch.ml.scoring.quality import rmse
from sparktorch.ml.scoring.single_row import score_row
from sparktorch.model.formats import write_as
from sparktorch.model.scorer import Scoring
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import input_columns
from sparktorch.spark.rdd import dataframe_of
from sparktorch.spark.scoring_udf import (
    found_in_python,
    result_column,
    rows_for_udf,
    scoring_udf,
    take_rows_in_sql,
    without_invalid,
)
from sparktorch.spark.session import session_of
from sparktorch.train.recipe.adapter import adapter_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TorchModel", "TorchModelBase"]


class TorchModelBase(Model, ModelParams, MLReadable[Any], MLWritable):
    """Base class of all fitted models.

    Models come from `fit` or `load`. A model constructed by hand has no module.
    """

    _estimator: str  # This is the import path of the estimator, whose module imports that of the model.
    _holder = "module"  # This Param of the estimator holds the module.
    _scores_by_row = True  # A model of series does not: it returns rows that it has not got.
    _trained: TrainedModule | None = None
    _summary: TrainingSummary | None = None

    def __repr__(self) -> str:
        """Returns type, uid and sizes, in the format of Spark's own models."""
        if self._trained is None:
            return str(super().__repr__())
        sizes = (f"{name}={size}" for name, size in html.sizes(self).items())
        return ", ".join([f"{type(self).__name__}: uid={self.uid}", *sizes])

    def _repr_html_(self) -> str:
        if self._trained is None:
            return html.block(type(self).__name__, self.uid)
        sizes = {name: html.number(size) for name, size in html.sizes(self).items()}
        facts = {"module": display_text(self._trained.source), **sizes, **html.settings(self)}
        course = self._summary._repr_html_() if self._summary is not None else ""
        return html.block(type(self).__name__, self.uid, html.pairs(facts), course)

    @classmethod
    def fromModule(
        cls,
        module: Any,
        dataset: DataFrame,
        *,
        weights: Weights | None = None,
        labels: Sequence[str] = (),
        **params: Any,
    ) -> Self:
        """Returns a model of a module that was trained elsewhere: it scores, is saved and is logged like a fitted one.

        Args:
            module: An instance with its weights; a class, its import path or a factory, with `moduleParams` for its
                arguments, and `weights`; a local folder with a model of Hugging Face's; a program, as
                `torch.export.ExportedProgram`, TorchScript, or the file of either; or a model of MLflow's `pytorch`
                flavour by its URI, `models:/name/1`, or folder. All are read as code that is trusted.
            dataset: Rows with the input columns; the first one without nulls says what types and shapes they have.
            weights: A state dict, or its file: of safetensors, or as `torch.save` writes it, also under the key
                "state_dict".
            labels: Names of a classifier's classes.
            params: Params of the model, and those of the estimator that say how columns become arguments, such as
                `inputCols`, `inputShapes` and `preprocess`.

        Raises:
            ConfigError: A Param is unknown, a class comes without weights, or `labels` are not those of the classes.
            ColumnError: An input column is missing, or is of no supported type.
            ModuleError: The module cannot be made, or does not fit the columns; or the weights are not its own.

        Example:
            >>> net = torch.nn.Linear(2, 1)
            >>> rows = spark.createDataFrame([([1.0, 2.0],)], "features array<float>")
            >>> model = TorchModel.fromModule(net, rows)
            >>> model.transform(rows).columns
            ['features', 'prediction']
        """
        estimator = load_object(cls._estimator)(**{cls._holder: module}, **params).completed()
        trained = trained_from(estimator, estimator._task, dataframe_of(dataset, "fromModule"), weights, labels)
        model: Self = estimator._copyValues(cls()._with(trained, None))
        return model

    def _quality(self, scored: DataFrame, label: str) -> tuple[str, int, float]:
        """Returns the name of a metric of scored rows, how many rows have it, and its value.

        Raises:
            ColumnError, ConfigError: The rows have no numbers to compare.
        """
        return rmse(scored, self.getPredictionCol(), label)

    def _with(self, trained: TrainedModule, summary: TrainingSummary | None) -> Self:
        self._trained = trained
        self._summary = None if summary is None else replace(summary, labels=trained.labels)
        return self

    @property
    def trained(self) -> TrainedModule:
        """The trained module, that is code, weights, inputs and outputs.

        Raises:
            ConfigError: The model was constructed by hand.
        """
        if self._trained is None:
            raise ConfigError(f"this {type(self).__name__} holds no module", hint="get one from fit() or load()")
        return self._trained

    def hasParam(self, paramName: str) -> bool:
        """Whether there is a Param of this name."""
        # pyspark's own method gets the attribute of this name, which would build the module for `hasParam("module")`.
        return paramName in {param.name for param in self.params}

    @property
    def module(self) -> nn.Module:
        """A new copy of the trained `nn.Module`, in evaluation mode, on the CPU."""
        return self.trained.build()

    @property
    def numFeatures(self) -> int:
        """Number of input values per row; -1 if rows differ in length, or `preprocess` determines it."""
        widths = [-1 if spec.ragged or spec.as_it_is else spec.width for spec in self.trained.inputs]
        return -1 if -1 in widths else sum(widths)

    @property
    def hasSummary(self) -> bool:
        """Whether the model has a training summary."""
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """The training summary.

        Raises:
            ConfigError: The model has none.
        """
        if self._summary is None:
            raise ConfigError("this model has no training summary")
        return self._summary

    @shortens
    def _transform(self, dataset: DataFrame) -> DataFrame:
        fields, outputs = self._fields()
        if not outputs:
            return dataset
        dataset = dataframe_of(dataset, "transform")
        make_room(dataset.sparkSession, 1)
        names = ColumnNames.of(dataset)
        check_outputs(names, list(outputs))
        inputs = self._inputs()
        with naming_params(self, fits=False):
            columns = input_columns(dataset, inputs)
        scored = f"__{self.uid}".replace(".", "_")  # A dot would name a field.
        udf = scoring_udf(dataset.sparkSession, self.trained, fields, self._scoring(), stream=dataset.isStreaming)
        results = []
        for name, field in outputs.items():
            column = result_column(F.col(scored), field, fields[field])
            results.append(column.alias(name, metadata=self._attribute(field, fields[field])))
        sources = [name for spec in inputs for name in (spec.sources or (spec.column,))]
        rows = rows_for_udf(dataset, [names.column(name) for name in sources])
        if self.getHandleInvalid() == "skip":
            rows = without_invalid(rows, columns, inputs)
        row_filter = self._row_filter(F.col(scored), inputs)
        if row_filter is not None:  # Spark would evaluate a deterministic UDF once more for a filter on its result.
            udf = udf.asNondeterministic()
        # select("*") keeps the user's columns, including duplicate names, which cannot be selected by name.
        rows = rows.select("*", udf(*columns).alias(scored))
        if row_filter is not None:
            rows = rows.where(row_filter)
        return rows.select("*", *results).drop(scored)

    def _row_filter(self, scored: Column, inputs: Sequence[TensorSpec]) -> Column | None:
        """Returns a condition on the struct of the scores that tells which rows stay; `None` if all do."""
        # Most invalid rows are left out before they are scored; the others have scores of null.
        if self.getHandleInvalid() != "skip" or not found_in_python(inputs):
            return None
        return scored[next(iter(self._fields()[0]))].isNotNull()

    def registerUDF(self, name: str, outputCol: str | None = None, spark: SparkSession | None = None) -> None:
        """Registers the model with a session as an SQL function, `SELECT name(features) FROM ...`.

        It takes one argument per input column, of any type that the model could have been fitted on,
        and returns the values of `outputCol`, vectors as arrays.

        In Spark 4.2 and newer, Python UDFs fail on ML vectors from columnar files. To avoid this, the method sets
        `spark.sql.execution.arrow.pythonUDF.columnarInput.enabled` to false for the session, unless it is set already.

        Args:
            name: The function's name.
            outputCol: One of the model's output columns; by default `predictionCol`, or the first one.
            spark: The session; by default the thread's active one, or that of `SparkSession.builder`.

        Raises:
            ConfigError: The model has no such output column, or `handleInvalid` is "skip".
        """
        if self.getHandleInvalid() == "skip":
            raise ConfigError(
                "an SQL function gives a result for every row, and handleInvalid is 'skip'",
                hint="set handleInvalid='keep', and leave out null results with WHERE",
                param="handleInvalid",
            )
        spark = spark or session_of(None)
        fields, outputs = self._fields()
        default = self.getPredictionCol()
        if default not in outputs:
            default = next(iter(outputs), "")
        column = outputCol or default
        one_of("outputCol", column, tuple(outputs))
        field = outputs[column]
        udf = scoring_udf(spark, self.trained, {field: fields[field]}, self._scoring(), struct=False)
        spark.udf.register(name, udf)
        take_rows_in_sql(spark)

    def _scoring(self) -> Scoring:
        """Returns the Params of scoring; a `ConfigError` says that one is out of range."""
        check_scoring(Values(self))
        return Scoring(
            batch_size=self.getPredictBatchSize(),
            device=self.getDevice(),
            precision=cast(Precision, self.getPredictPrecision()),
            compiled=self.getPredictCompile(),
            invalid=cast(Invalid, self.getHandleInvalid()),
            layers=tuple((layer_field(index), layer) for index, layer in enumerate(self.getOutputLayers().values())),
        )

    def _inputs(self) -> list[Any]:
        """Returns the input specs, renamed to the columns that the Params name now."""
        specs = self.trained.inputs
        names = input_names(self)
        count = sum(len(spec.sources) or 1 for spec in specs)
        if len(names) != count:
            raise ConfigError(f"the model takes {count} input columns, got {names}", param="inputCols")
        remaining = iter([names[index] for index in positions_of(specs)])
        renamed = []
        for spec in specs:
            sources = tuple(islice(remaining, len(spec.sources)))
            renamed.append(replace(spec, sources=sources) if sources else replace(spec, column=next(remaining)))
        return renamed

    def _fields(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the type of each field of the scores (SQL or "vector"), and the field of each output column."""
        fields, outputs = self._prediction_fields()
        output_layers = self.getOutputLayers()
        if not output_layers:
            return fields, outputs
        check_layers(output_layers, self.trained.layers)
        layers = {name: layer_field(index) for index, name in enumerate(output_layers) if name}
        outputs = output_fields([*outputs.items(), *layers.items()])
        return {**fields, **dict.fromkeys(layers.values(), "array<float>")}, outputs

    def _prediction_fields(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the types of the fields and the output columns without those of `outputLayers`."""
        name = self.getPredictionCol()
        return ({"prediction": self._kind}, {name: "prediction"}) if name else ({}, {})

    @property
    def _kind(self) -> str:
        """The SQL type of a model's one prediction."""
        return "float"

    def _attribute(self, field: str, kind: str) -> dict[str, Any]:
        """Returns the ML attribute of the output column of a field of the scores; `kind` is SQL or "vector"."""
        return numeric() if kind in ("float", "double") else {}

    def _score(self, row: Any, fields: list[str]) -> list[Any]:
        return score_row(self, self.trained, self._inputs(), self._scoring(), row, fields)

    def _score_row(self, row: Any, field: str) -> Any:
        """Scores one row in this process; returns one field."""
        return self._score(row, [field])[0]

    def save_pretrained(self, folder: str) -> None:
        """Writes a model of Hugging Face's to a local folder, which `AutoModel...from_pretrained(folder)` opens.

        The tokenizer or image processor is written beside it, if the model was fitted by `TextClassifier` or
        `ImageClassifier`.

        Raises:
            AttributeError: The module is no model of transformers.
        """
        trained = self.trained
        preprocessor = trained.preprocess.load() if isinstance(trained.preprocess, LoadedPreprocess) else None
        module = trained.build()
        adapter_of(module).write(module, folder, trained.labels, preprocessor)

    def export(self, path: str, format: str = "onnx") -> None:
        """Writes the module to a local file for other programs.

        A graph takes the tensors that `forward` takes, of any number of rows, and returns what it returns: `preprocess`
        is not in it, nor what scoring adds, as the probabilities of a classifier's scores.

        Args:
            path: The file, which is overwritten.
            format: "onnx" (extra `onnx`); "pt2", a program of `torch.export`; or "safetensors", the weights, with a
                JSON file beside them that says what makes the module, and its inputs and outputs.

        Raises:
            ConfigError: There is no such format, or a library for it is not installed.
            PersistenceError: torch cannot capture the graph, or write it in this format; the message says why.
        """
        write_as(self.trained, Path(path), format)

    def deleteWeights(self) -> None:
        """Deletes the folder under `modelDir` that has the weights, which the model and its saved copies then lack.

        Raises:
            PersistenceError: The model was not fitted with `modelDir`, or the folder cannot be deleted from here.
        """
        weights = self.trained.weights
        if not isinstance(weights, WeightsFolder):
            raise PersistenceError("the model has its weights with it, and no folder", hint="it needs no clean-up")
        weights.delete()

    def write(self) -> ModelWriter:
        """Returns a writer; `option("allowPickle", "true")` allows a module without an import path."""
        return ModelWriter(self)

    @classmethod
    def read(cls) -> ModelReader[Any]:
        """Returns a reader; `option("allowPickle", "true")` allows a pickled module."""
        return ModelReader(cls)


class TorchModel(TorchModelBase, GenericModelParams):
    """A module fitted by `TorchEstimator`.

    `transform` adds the output as `predictionCol`: float for one value per row, (nested) arrays of
    float otherwise. Several outputs go to `outputCols`, in the order in which `forward` returns them. So does
    a single output if `outputCols` is set.
    """

    _estimator = "sparktorch.ml.estimator:TorchEstimator"

    def predict(self, value: Any) -> Any:
        """Scores one row in this process, without a Spark job.

        Args:
            value: The input: a vector or a (nested) list; for several input columns, a `Row` or dict.

        Returns:
            A number or (nested) lists of numbers; for several outputs, a dict by the names in `outputCols`. Each is
            `None` for an invalid row that `handleInvalid` keeps or skips.

        Raises:
            ColumnError: An input is missing, or has another type or shape than in the fit.
        """
        if len(self.trained.outputs) == 1:
            return self._score_row(value, "prediction")
        _, outputs = self._prediction_fields()
        scored = self._score(value, list(outputs.values()))
        return dict(zip(outputs, scored, strict=True))

    def _prediction_fields(self) -> tuple[dict[str, str], dict[str, str]]:
        specs = self.trained.outputs
        names = self.getOutputCols() if self.isDefined("outputCols") else []
        if len(specs) == 1 and not names:
            names = [self.getPredictionCol()]
        if len(names) != len(specs):
            raise ConfigError(
                f"the module returns {len(specs)} tensors ({', '.join(spec.name for spec in specs)}), "
                f"outputCols names {len(names)}",
                hint="set outputCols, one name per tensor",
                param="outputCols",
            )
        single = len(specs) == 1
        fields = {"prediction" if single else spec.name: sql_type(spec.shape) for spec in specs}
        return fields, output_fields(zip(names, fields, strict=True))
