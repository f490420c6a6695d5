"""How the stages of a model are written for MLflow, and read: ours as plain files, Spark's by its flavour `spark`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.ml import PipelineModel
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from sparktorch.errors import PersistenceError
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.persistence import FOR_ALL, read_local, write_local
from sparktorch.spark.column_names import quoted
from sparktorch.spark.compat import unlogged_errors
from sparktorch.spark.session import is_connect, setting
from sparktorch.tracking.signature import signature_of, type_of, zeros_for

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.models import Model, ModelSignature

__all__ = ["form_of", "read_own_stages", "read_spark_stages", "with_doubles", "without_vectors"]

_COLUMNS = "columns.json"
_EXAMPLE_ROWS = 5
_WITHOUT_NULLS = ("tinyint", "smallint", "int", "bigint", "boolean")  # pandas has no nulls in such columns.


def form_of(model: Any, input_example: Any) -> _OwnStages | _SparkStages:
    """Returns the form in which a model, a pipeline or the model of a search is written; see `flavor.save_model`."""
    model = getattr(model, "bestModel", model)
    stages = _flat(model)
    ours = [stage for stage in stages if isinstance(stage, TorchModelBase)]
    by_row = all(stage._scores_by_row for stage in ours)
    if len(ours) == len(stages) == 1 and not by_row:
        return _Alone(ours[0], ours, input_example)
    if len(ours) == len(stages) and by_row:
        return _OwnStages(model, ours, input_example)
    if isinstance(model, PipelineModel):
        return _SparkStages(model, stages, ours, input_example)
    hint = "mlflow.spark.log_model logs a single model of Spark's"
    raise TypeError(f"sparktorch logs its fitted models, and fitted pipelines, and got {type(model).__name__}; {hint}")


def _flat(model: Any) -> list[Any]:
    """Returns the stages of a pipeline and of pipelines within it; the model of a search stands for its best model."""
    model = getattr(model, "bestModel", model)
    if not isinstance(model, PipelineModel):
        return [model]
    stages: list[Any] = []
    for stage in model.stages:
        stages += _flat(stage)
    return stages


class _OwnStages:
    """The form of a model of ours, or of a pipeline of such models. `write` is called before the other methods.

    Attributes:
        alone: Whether all stages are ours.
        loader: The module that loads the pyfunc, with `config`.
        packages: The packages that it needs besides those of our models.
        ours: The stages that are models of ours. Each stage of a pipeline has a folder.
    """

    all_ours = True
    loader = "sparktorch.tracking.pyfunc"
    # The serving machine may differ from the Param `device`'s, and its time zone from the session's.
    config: Mapping[str, Any] = {"device": "auto", "time_zone": "auto"}
    packages: tuple[str, ...] = ()

    def __init__(self, model: Any, ours: list[TorchModelBase], input_example: Any) -> None:
        self.ours, self._model, self._example = ours, model, input_example

    def write(
        self, data: Path, mlflow_model: Model, code_paths: list[str], conda_env: Any, *, allow_pickle: bool
    ) -> str | None:
        """Writes stages and code into a folder of MLflow's model; returns the path of the code within the model."""
        from mlflow.utils.model_utils import _validate_and_copy_code_paths

        code: str | None = _validate_and_copy_code_paths(code_paths, str(data.parent))
        folders = [data]
        if isinstance(self._model, PipelineModel):
            names = [str(index) for index in range(len(self.ours))]
            (data / _COLUMNS).write_text(json.dumps({"uid": self._model.uid, "stages": names}))
            folders = [data / name for name in names]
        for stage, folder in zip(self.ours, folders, strict=True):
            folder.mkdir(exist_ok=True)
            write_local(stage, folder, allow_pickle=allow_pickle)
            (folder / _COLUMNS).write_text(json.dumps(_columns(stage)))
        return code

    def signature(self) -> ModelSignature:
        """Returns the signature."""
        return signature_of(self.ours)

    def example(self) -> Any:
        """Returns a few input rows."""
        if _is_frame(self._example):
            return _first_rows(self._example, utc=True)  # The pyfunc reads times without a zone as UTC.
        return self._zeros() if self._example is None else self._example

    def _zeros(self) -> Any:
        return zeros_for(self.ours)


class _Alone(_OwnStages):
    """The form of a model that does not return a row for each row that it gets, and so is no stage among others."""

    def signature(self) -> ModelSignature:
        signature: ModelSignature = self._model._mlflow_signature()
        return signature

    def _zeros(self) -> Any:
        return self._model._mlflow_example()


def _columns(model: Any) -> dict[str, Any]:
    """Returns the columns and scoring Params of a model, with the output column of each field."""
    if not model._scores_by_row:
        columns: dict[str, Any] = model._mlflow_columns()
        return columns
    _, outputs = model._fields()
    return {
        "inputs": [name for spec in model._inputs() for name in spec.sources or (spec.column,)],
        "outputs": {field: name for name, field in outputs.items()},
        **model._scoring().to_dict(),
    }


class _SparkStages:
    """The form of a pipeline with stages of Spark's, which a session serves; with the methods of `_OwnStages`.

    The inputs are the columns of the example without which the pipeline does not transform. The outputs are the columns
    that the first stage with a `predictionCol`, and the stages after it, add.
    """

    all_ours = False
    packages = ("pyspark",)
    loader = "sparktorch.tracking.spark_pyfunc"
    config: Mapping[str, Any] = {"time_zone": "auto"}

    def __init__(self, model: PipelineModel, stages: list[Any], ours: list[TorchModelBase], input_example: Any) -> None:
        self.ours = ours
        self._model = PipelineModel(stages)._resetUid(model.uid)
        if input_example is None:
            what = "a pipeline with stages of Spark's does not say of which types its input columns are"
            raise PersistenceError(what, hint="pass a few raw rows, as input_example=df.limit(5)")
        rows = input_example
        if not _is_frame(rows):
            rows = SparkSession.builder.getOrCreate().createDataFrame(rows)
        if is_connect(rows.sparkSession):
            what = "MLflow saves no stages of Spark's from Spark Connect"
            raise PersistenceError(what, hint="log the stages that are sparktorch's, or log it in a classic session")
        self._spark = rows.sparkSession
        self._model.transform(rows)  # This raises what is wrong with the rows, if anything is.
        needed = [name for name in rows.columns if not _transforms(self._model, rows.drop(name))]
        first = next((index for index, stage in enumerate(stages) if stage.hasParam("predictionCol")), 0)
        rows = rows.select(*map(quoted, needed))
        before = PipelineModel(stages[:first]).transform(rows).columns
        added = [field for field in self._model.transform(rows).schema if field.name not in before]
        self._inputs = {field.name: field.dataType.simpleString() for field in rows.schema}
        self._outputs = {field.name: field.dataType.simpleString() for field in added}
        self._example = _first_rows(rows)

    def write(
        self, data: Path, mlflow_model: Model, code_paths: list[str], conda_env: Any, *, allow_pickle: bool
    ) -> str | None:
        import mlflow.spark

        with _pickles(self._spark, allow_pickle):
            mlflow.spark.save_model(
                self._model,
                str(data.parent),
                mlflow_model=mlflow_model,
                conda_env=conda_env,  # Without it, MLflow starts a JVM to find the libraries.
                code_paths=code_paths,
                signature=False,
            )
        (data / _COLUMNS).write_text(
            json.dumps({"inputs": self._inputs, "outputs": self._outputs, "zone": _zone(self._spark)})
        )
        code: str | None = mlflow_model.flavors["spark"].get("code")
        return code

    def signature(self) -> ModelSignature:
        from mlflow import types
        from mlflow.models import ModelSignature
        from mlflow.types.schema import AnyType

        rows = self._example
        inputs: list[Any] = [
            # pandas has other types for integers and booleans beside a null, and MLflow refuses them.
            types.ColSpec(AnyType() if kind in _WITHOUT_NULLS and rows[name].isna().any() else _input_type(kind), name)
            for name, kind in self._inputs.items()
        ]
        outputs: list[Any] = [types.ColSpec(_type_of(kind), name) for name, kind in self._outputs.items()]
        return ModelSignature(inputs=types.Schema(inputs), outputs=types.Schema(outputs))

    def example(self) -> pd.DataFrame:
        return self._example


def _transforms(model: PipelineModel, rows: DataFrame) -> bool:
    """Whether a pipeline takes rows of these columns; this starts no job."""
    try:
        with unlogged_errors():
            model.transform(rows)
    except Exception:  # Every kind of stage has an error of its own for a missing column.
        return False
    return True


def _type_of(sql: str) -> Any:
    """Returns MLflow's type of a column; `Any` if MLflow has none, as for maps."""
    from mlflow.types.schema import AnyType

    try:
        return type_of(with_doubles(sql))
    except ValueError:
        return AnyType()


def _input_type(sql: str) -> Any:
    """Returns MLflow's type of an input column; `Any` for times.

    MLflow takes whole numbers for times, and refuses times that have a zone; the pyfunc checks them itself.
    """
    from mlflow.types.schema import AnyType

    return AnyType() if re.search(r"\b(date|timestamp)", sql) else _type_of(sql)


def _is_frame(rows: Any) -> bool:
    """Whether rows are a DataFrame of Spark's, classic or Connect."""
    return hasattr(rows, "sparkSession")


def _first_rows(rows: DataFrame, *, utc: bool = False) -> pd.DataFrame:
    """Returns a few rows as pandas: vectors as arrays, decimals as doubles, timestamps in the session's zone or UTC."""
    rows = without_vectors(rows.limit(_EXAMPLE_ROWS))
    schema = T.StructType.fromJson(json.loads(with_doubles(rows.schema.json())))
    table = rows.select(*(quoted(field.name).cast(field.dataType).alias(field.name) for field in schema)).toPandas()
    for field in schema:
        if utc and isinstance(field.dataType, T.TimestampType):
            table[field.name] = _in_utc(table[field.name], _zone(rows.sparkSession)).dt.tz_localize(None)
    return table


def with_doubles(types: str) -> str:
    """Returns SQL types, or a schema's JSON, with decimals as doubles."""
    return re.sub(r"\bdecimal\(\d+,\d+\)", "double", types)


def _zone(spark: SparkSession) -> str:
    return setting(spark, "spark.sql.session.timeZone")


def _in_utc(values: pd.Series[Any], zone: str) -> pd.Series[Any]:
    """Returns times in UTC; those without a time zone are in `zone`."""
    if values.dt.tz is None:
        values = values.dt.tz_localize(zone, ambiguous=False, nonexistent="shift_forward")
    in_utc: pd.Series[Any] = values.dt.tz_convert("UTC")
    return in_utc


def without_vectors(rows: DataFrame) -> DataFrame:
    """Returns rows with vectors as arrays of double."""
    vectors = {field.name for field in rows.schema if field.dataType.simpleString() == "vector"}
    columns = {name: vector_to_array(quoted(name)) if name in vectors else quoted(name) for name in rows.columns}
    return rows.select(*(column.alias(name) for name, column in columns.items()))


@contextmanager
def _pickles(spark: SparkSession, allowed: bool) -> Iterator[None]:
    """Allows pickles for the block by a setting of the session, because stages get no options."""
    before = setting(spark, FOR_ALL, "false")
    if allowed:
        spark.conf.set(FOR_ALL, "true")
    try:
        yield
    finally:
        spark.conf.set(FOR_ALL, before)


def read_own_stages(data: Path, *, allow_pickle: bool, code: Path | None) -> Any:
    """Reads a model of ours, or a pipeline of them."""
    settings = json.loads((data / _COLUMNS).read_text())
    if "stages" not in settings:
        return read_local(data, allow_pickle=allow_pickle, code=code)
    stages = [read_local(data / name, allow_pickle=allow_pickle, code=code) for name in settings["stages"]]
    return PipelineModel(stages)._resetUid(settings["uid"])


def read_spark_stages(model: Path, *, allow_pickle: bool) -> PipelineModel:
    """Reads a pipeline from the folder of MLflow's model, in the session of this process."""
    import mlflow.spark

    with _pickles(SparkSession.builder.getOrCreate(), allow_pickle):
        pipeline: PipelineModel = mlflow.spark.load_model(str(model))
    return pipeline
