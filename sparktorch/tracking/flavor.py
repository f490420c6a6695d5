"""The MLflow flavour: `log_model`, `save_model`, `load_model`, and a `python_function` beside it.

In the model's directory, `sparktorch/` holds the plain files of the artifact and two more:
`model.json` (class, uid and Params of the Spark model) and `columns.json` (for the pyfunc).
"""

from __future__ import annotations

import importlib
import json
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sparktorch
from sparktorch.errors import PersistenceError

if TYPE_CHECKING:
    from mlflow.models import ModelSignature
    from mlflow.models.model import ModelInfo

    from sparktorch.data.columns import TensorSpec
    from sparktorch.ml.model import TorchModelBase

__all__ = ["FLAVOR_NAME", "load_model", "log_model", "save_model"]

FLAVOR_NAME = "sparktorch"
_DATA = "sparktorch"


def log_model(
    model: TorchModelBase,
    name: str = "model",
    *,
    registered_model_name: str | None = None,
    code_paths: list[str] | None = None,
    allow_pickle: bool = False,
    **kwargs: Any,
) -> ModelInfo:
    """Logs a fitted model to the active MLflow run.

    Args:
        model: What `fit` returned.
        name: The model's name in the run.
        registered_model_name: Registers the model under this name.
        code_paths: Files and folders of code to keep beside the model; by default the file or
            package that the module comes from, if it is not an installed one.
        allow_pickle: Whether a module without import path may be pickled.
        kwargs: Passed to `mlflow.models.Model.log`: `step=`, `model_id=`, `metadata=`, ...

    Raises:
        PersistenceError: The module has no import path and `allow_pickle` is not set.
    """
    from mlflow.models import Model

    info: ModelInfo = Model.log(
        artifact_path=None,
        name=name,
        flavor=importlib.import_module(__name__),
        registered_model_name=registered_model_name,
        sparktorch_model=model,
        code_paths=code_paths,
        allow_pickle=allow_pickle,
        **kwargs,
    )
    return info


def save_model(
    sparktorch_model: TorchModelBase,
    path: str,
    *,
    mlflow_model: Any = None,
    code_paths: list[str] | None = None,
    allow_pickle: bool = False,
    pip_requirements: list[str] | None = None,
    **_: Any,
) -> None:
    """Saves a fitted model as an MLflow model in a new local directory.

    Args:
        sparktorch_model: What `fit` returned.
        path: The directory to make.
        mlflow_model: The MLflow model to fill in; MLflow passes it.
        code_paths: As for `log_model`.
        allow_pickle: As for `log_model`.
        pip_requirements: Replaces the pinned requirements.

    Raises:
        PersistenceError: The module has no import path and `allow_pickle` is not set.
    """
    from mlflow import pyfunc
    from mlflow.models import Model
    from mlflow.models.model import MLMODEL_FILE_NAME
    from mlflow.utils.environment import _mlflow_conda_env, _PythonEnv
    from mlflow.utils.model_utils import _validate_and_copy_code_paths, _validate_and_prepare_target_save_path

    from sparktorch.ml.io import write_local

    _validate_and_prepare_target_save_path(path)
    trained = sparktorch_model.trained
    code = _validate_and_copy_code_paths(code_paths or _code_of(trained.source), path)
    data = Path(path) / _DATA
    data.mkdir()
    write_local(sparktorch_model, data, allow_pickle=allow_pickle)
    inputs = [spec.column for spec in sparktorch_model._inputs()]
    _, outputs = sparktorch_model._fields()
    columns = {
        "inputs": inputs,
        "outputs": {field: name for name, field in outputs.items()},
    }
    (data / "columns.json").write_text(json.dumps(columns))

    mlflow_model = mlflow_model or Model()
    if mlflow_model.signature is None:
        mlflow_model.signature = _signature(sparktorch_model, inputs, outputs)
    requirements = pip_requirements or _requirements()
    files = {"conda_env": "conda.yaml", "python_env": "python_env.yaml"}
    pyfunc.add_to_model(mlflow_model, loader_module="sparktorch.tracking.pyfunc", data=_DATA, code=code, **files)
    mlflow_model.add_flavor(FLAVOR_NAME, version=sparktorch.__version__, data=_DATA, code=code)
    mlflow_model.save(os.path.join(path, MLMODEL_FILE_NAME))
    _mlflow_conda_env(path=os.path.join(path, files["conda_env"]), additional_pip_deps=requirements)
    _PythonEnv.current().to_yaml(os.path.join(path, files["python_env"]))
    (Path(path) / "requirements.txt").write_text("\n".join(requirements) + "\n")


def load_model(model_uri: str, *, allow_pickle: bool = False) -> Any:
    """Loads a model from MLflow as the Spark model that was logged.

    Args:
        model_uri: `models:/name/1`, `models:/name@alias`, `runs:/<run_id>/model`, or a path.
        allow_pickle: Whether pickled code may be run; only for models you trust.

    Raises:
        PersistenceError: The model is of another flavour, or holds pickled code.
    """
    from mlflow.models import Model
    from mlflow.tracking.artifact_utils import _download_artifact_from_uri
    from mlflow.utils.model_utils import _add_code_from_conf_to_system_path

    from sparktorch.ml.io import read_local

    local = Path(_download_artifact_from_uri(artifact_uri=model_uri))
    conf = Model.load(str(local)).flavors.get(FLAVOR_NAME)
    if conf is None:
        raise PersistenceError(f"{model_uri} was not logged by sparktorch", hint="try mlflow.pyfunc.load_model")
    _add_code_from_conf_to_system_path(str(local), conf)
    return read_local(local / conf["data"], allow_pickle=allow_pickle)


def _code_of(source: Any) -> list[str]:
    """Returns the file or package folder that the module comes from, unless it is installed."""
    name = source.partition(":")[0] if isinstance(source, str) else getattr(source, "__module__", "__main__")
    file = getattr(importlib.import_module(name.partition(".")[0]), "__file__", None)
    if name in ("__main__", "builtins") or file is None:
        return []
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(Path(sparktorch.__file__).parent)]
    if any(Path(file).resolve().is_relative_to(Path(root).resolve()) for root in installed):
        return []
    return [str(Path(file).parent) if Path(file).name == "__init__.py" else file]


def _signature(model: TorchModelBase, inputs: list[str], outputs: dict[str, str]) -> ModelSignature:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import Array, DataType

    numbers = {"float32": DataType.float, "float64": DataType.double, "int64": DataType.long}

    def kind_of(spec: TensorSpec) -> Any:
        return Array(numbers[spec.dtype]) if spec.shape else numbers[spec.dtype]

    def output_kind(sql: str) -> Any:
        depth = sql.count("array<")
        kind: Any = DataType.double if "double" in sql else DataType.float
        for _ in range(depth):
            kind = Array(kind)
        return kind

    fields, _ = model._fields()
    specs = model.trained.inputs
    return ModelSignature(
        inputs=Schema([ColSpec(kind_of(spec), name) for spec, name in zip(specs, inputs, strict=True)]),
        outputs=Schema([ColSpec(output_kind(fields[field]), name) for name, field in outputs.items()]),
    )


def _requirements() -> list[str]:
    """Pins what scoring needs; neither pyspark nor Java is among it."""
    from importlib.metadata import version

    names = ("mlflow", "numpy", "pandas", "pyarrow", "safetensors", "torch")
    pinned = [f"{name}=={version(name).partition('+')[0]}" for name in names]
    return [f"sparktorch-estimator=={sparktorch.__version__}", *pinned]
