"""What a fit logs besides metrics: Params, data set, environment."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import sparktorch
from sparktorch.base.redact import shown
from sparktorch.errors import redacted
from sparktorch.spark.session import java_version, setting
from sparktorch.tracking.signature import column_type

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput
    from pyspark.ml.param import Params

    from sparktorch.data.columns import Columns
    from sparktorch.ml.fit.listeners import Fit
    from sparktorch.ml.fit.summary import TrainingSummary

__all__ = ["data_set", "environment", "params"]

_LONGEST = 500  # characters of a Param's value that every MLflow store accepts
_PACKAGES = ("torch", "pyspark", "pyarrow", "numpy", "mlflow")


def params(estimator: Params) -> dict[str, str]:
    """Returns the Params that are set or have a default, as readable text."""
    values = {param.name: value for param, value in estimator.extractParamMap().items()}
    return {
        name: (redacted(value) if isinstance(value, str) else shown(value))[:_LONGEST]
        for name, value in sorted(values.items())
    }


def environment(fit: Fit) -> dict[str, Any]:
    """Returns versions and cluster of the fit, JSON-serializable."""
    return {
        "python": platform.python_version(),
        "sparktorch": sparktorch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "java": java_version(fit.spark),
        "spark": fit.spark.version,
        "spark.master": setting(fit.spark, "spark.master"),
        "world_size": fit.estimator.getOrDefault("numWorkers"),
    }


def data_set(columns: Columns, summary: TrainingSummary) -> DatasetInput:
    """Returns the training set as the input of a run; needs no Spark job."""
    from mlflow.data.code_dataset_source import CodeDatasetSource
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.tracking.context.registry import resolve_tags
    from mlflow.types import ColSpec, Schema
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    schema = Schema(
        [ColSpec(column_type(spec), name) for spec in columns.tensors for name in spec.sources or (spec.column,)]
    )
    profile = {"num_rows": summary.rows, "num_validation_rows": summary.validationRows}
    source = CodeDatasetSource(resolve_tags())
    data = Dataset(
        name="dataset",
        digest=summary.fingerprint,
        source_type=source._get_source_type(),
        source=source.to_json(),
        schema=json.dumps({"mlflow_colspec": schema.to_dict()}),
        profile=json.dumps(profile),
    )
    return DatasetInput(data, [InputTag(MLFLOW_DATASET_CONTEXT, "train")])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # e.g. with mlflow-skinny
        return None
