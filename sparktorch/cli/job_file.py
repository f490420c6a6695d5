"""A training job as a YAML file: data, estimator, tracking, scoring. `sparktorch train` and `score` read it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparktorch
from sparktorch.base.config import from_dict, one_of
from sparktorch.base.imports import load_object
from sparktorch.errors import ConfigError, ModuleError
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.first_row_trial import as_planned
from sparktorch.ml.fit.translate import translate
from sparktorch.spark.column_names import ColumnNames, quoted
from sparktorch.spark.frame.equal_rows import NUMBER, tell_apart
from sparktorch.spark.rdd import dataframe_of

__all__ = ["DataSection", "EstimatorSection", "JobConfig", "ScoreSection", "TrackingSection", "read_job"]

_BUCKETS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The section `data`. The rows come from a function, or from anything that Spark reads.

    Attributes:
        source: Import path of a function `(spark) -> DataFrame`.
        format: A format of `spark.read`, as an alternative to `source`.
        path: The path to read.
        options: Options of the format.
        schema: The columns as DDL, for formats without a schema.
        holdout: The share of rows to hold out from training for scoring. The contents of a row decide whether the row
            is held out; with an estimator's `groupCol`, this column decides, so that whole groups are held out.
    """

    source: str | None = None
    format: str = "parquet"
    path: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    schema: str | None = None
    holdout: float = 0.0

    def __post_init__(self) -> None:
        if (self.source is None) == (self.path is None):
            raise ConfigError("data needs either source or path", section="data")
        if not 0 <= self.holdout < 1:
            raise ConfigError(f"data.holdout must be in [0, 1), got {self.holdout}", section="data")

    def load(self, spark: SparkSession) -> DataFrame:
        """Returns all rows."""
        if self.source is not None:
            return dataframe_of(load_object(self.source)(spark), f"a job, of {self.source},")
        reader = spark.read.format(self.format).options(**self.options)
        if self.schema:
            reader = reader.schema(self.schema)
        return reader.load(self.path)

    def stream(self, spark: SparkSession) -> DataFrame:
        """Returns the existing rows under `path`, and the rows that arrive later, as a streaming DataFrame.

        `schema` says the columns, or, without `schema`, the existing data does. A `ConfigError` refuses a `source`.
        """
        if self.path is None:
            raise ConfigError(
                f"{self.source} is a function, and only files and tables can be streamed",
                hint="name them with format and path",
                section="data",
            )
        reader = spark.readStream.format(self.format).options(**self.options)
        return reader.schema(self.schema or self.load(spark).schema).load(self.path)

    def split(self, data: DataFrame, group: str | None = None) -> tuple[DataFrame, DataFrame]:
        """Splits the rows by their contents, or by a column; returns the training rows and the held-out rows."""
        if not self.holdout:  # This comes first, because some columns, such as maps, cannot be hashed.
            return data, data.limit(0)
        if group:
            hashed = [ColumnNames.of(data).column(group)]
        else:
            columns = [quoted(name) for name in data.columns]
            data, hashed = tell_apart(data, columns, columns)
        bucket = F.pmod(F.xxhash64(*hashed), F.lit(_BUCKETS))
        held_out = bucket < F.lit(int(self.holdout * _BUCKETS))
        return data.where(~held_out).drop(NUMBER), data.where(held_out).drop(NUMBER)


@dataclass(frozen=True, kw_only=True)
class EstimatorSection:
    """The estimator and its Params.

    Attributes:
        kind: The name of an estimator: `TabularClassifier`, `TabularRegressor`, `TorchClassifier`, `TorchRegressor`,
            `TorchEstimator`, `TextClassifier`, `ImageClassifier`, `Recommender`, `Ranker` or `Forecaster`.
        params: The Params of the estimator by name.
    """

    kind: str
    params: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("estimator.kind", self.kind, _estimators())
        _, *valid = inspect.signature(getattr(sparktorch, self.kind).__init__).parameters
        # The names are checked here and not in `build`, because scoring builds no estimator.
        for name in self.params:
            one_of("estimator.params", name, tuple(valid))

    def build(self, *, planned: bool = False, **more: Any) -> Any:
        """Builds the estimator, with `more` Params, and makes all checks that need no session.

        An estimator that is only `planned` may lack a strategy. A `ConfigError` or `ModuleError` refuses a Param.
        """
        try:
            estimator = getattr(sparktorch, self.kind)(**{**self.params, **more})
        except TypeError as error:
            raise ConfigError(f"estimator.params: {error}", section="estimator.params") from error
        with _may_be_shipped():
            recipe = translate(as_planned(estimator) if planned else estimator, estimator._task).job.recipe
            for value in (recipe.module, recipe.training_step, recipe.loss, recipe.optimizer, recipe.scheduler):
                if isinstance(value, str) and ":" in value:
                    with _may_be_shipped():
                        load_object(value)
        return estimator


@contextmanager
def _may_be_shipped() -> Iterator[None]:
    """Context that ignores a missing Python module, because the session may ship the module."""
    try:
        yield
    except ModuleError as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise


@dataclass(frozen=True, kw_only=True)
class TrackingSection:
    """The section `tracking`: where MLflow logs to.

    Attributes:
        uri: The tracking URI; by default, MLflow's own settings name one.
        artifacts: Where a new experiment keeps its artifacts.
        experiment: Name of the experiment.
        model: The name under which the model is registered; by default, the `name` of the job.
    """

    uri: str | None = None
    artifacts: str | None = None
    experiment: str = "sparktorch"
    model: str | None = None

    def connect(self) -> None:
        """Sets MLflow's tracking URI and experiment; creates folders and experiment if they are missing."""
        import mlflow

        if self.uri is not None:
            if self.uri.startswith("sqlite:///"):
                folder = Path(self.uri.removeprefix("sqlite:///")).parent
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise ConfigError(f"cannot make the folder of tracking.uri: {error}", section="tracking") from error
            mlflow.set_tracking_uri(self.uri)
        if mlflow.get_experiment_by_name(self.experiment) is None:
            location = None if self.artifacts is None else Path(self.artifacts).absolute().as_uri()
            mlflow.create_experiment(self.experiment, artifact_location=location)
        mlflow.set_experiment(self.experiment)


@dataclass(frozen=True, kw_only=True)
class ScoreSection:
    """The section `score`: what scoring reads and writes.

    Attributes:
        data: The rows to score; by default the rows that are held out from training.
        model: URI of the model in MLflow; by default the newest registered version.
        output: The path to which the scored rows are written.
        format: A format of `DataFrame.write`.
        options: Options of the format.
    """

    output: str
    data: DataSection | None = None
    model: str | None = None
    format: str = "parquet"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The whole file."""

    name: str
    data: DataSection
    estimator: EstimatorSection
    score: ScoreSection | None = None
    tracking: TrackingSection = field(default_factory=TrackingSection)

    @property
    def registered_name(self) -> str:
        """The name under which MLflow registers the model."""
        return self.tracking.model or self.name

    def __post_init__(self) -> None:
        if self.estimator.kind == "Forecaster" and self.data.holdout and not self._group:
            raise ConfigError(
                f"data.holdout is {self.data.holdout}, and rows left out of the only series are gaps in it",
                hint="name other rows in score.data; with groupCol, whole series are held out",
                section="data",
            )

    @property
    def scoring(self) -> ScoreSection:
        """The section `score`; a `ConfigError` says that there is none."""
        if self.score is None:
            raise ConfigError("missing key score", hint="score: {output: PATH} says where scored rows go")
        return self.score

    @property
    def label(self) -> str:
        """The column with which predictions are compared; empty for a `Recommender` whose rows have no ratings."""
        params = self.estimator.params
        if self.estimator.kind != "Recommender":
            return str(params.get("labelCol", "label"))
        if params.get("implicitPrefs"):
            return ""
        return str(params.get("ratingCol", "rating"))

    @property
    def _group(self) -> str | None:
        group = self.estimator.params.get("groupCol")
        return None if group is None else str(group)

    def rows(self, spark: SparkSession) -> tuple[DataFrame, DataFrame]:
        """Returns the training rows and the held-out rows."""
        return self.data.split(self.data.load(spark), self._group)

    def to_score(self) -> DataSection | None:
        """Returns the section that names the rows to score, or `None` for the held-out rows.

        A `ConfigError` says that there are neither.
        """
        if self.scoring.data is None and not self.data.holdout:
            raise ConfigError(
                "no rows are named to score: data.holdout is 0, and score.data is not set",
                hint="name them in score.data; or set data.holdout, and train again on the rest",
                section="score",
            )
        return self.scoring.data


def _estimators() -> tuple[str, ...]:
    """Returns the public names of estimators."""
    names = []
    for name in sparktorch.__all__:
        with suppress(ImportError):  # Another public name may need a package that is not installed.
            public = getattr(sparktorch, name)
            if isinstance(public, type) and issubclass(public, TorchEstimatorBase):
                names.append(name)
    return tuple(names)


_SECTIONS: dict[str, type[Any]] = {
    "data": DataSection,
    "estimator": EstimatorSection,
    "tracking": TrackingSection,
    "score": ScoreSection,
}


def read_job(path: str | os.PathLike[str]) -> JobConfig:
    """Reads a job file; a `ConfigError` refuses a file that is no YAML mapping, or has wrong keys or values."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {os.fspath(path)}: {error}") from error
    job: JobConfig = _section(JobConfig, values, "", os.fspath(path))
    return job


def _section(kind: type[Any], values: Any, where: str, name: str = "") -> Any:
    """Returns a section of the file with the sections inside; messages call the section `name`, or else `where`."""
    if not isinstance(values, dict):
        raise ConfigError(f"{name or where} must be a mapping, got {values!r}", section=name or where)
    inner = {}
    for key in fields(kind):
        is_set = values.get(key.name, key.default) is not key.default
        if key.name in _SECTIONS and is_set:
            inner[key.name] = _section(_SECTIONS[key.name], values[key.name], f"{where}.{key.name}".removeprefix("."))
    return from_dict(kind, {**values, **inner}, where=where)
