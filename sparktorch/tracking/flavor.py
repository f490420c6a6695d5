"""The MLflow flavour: `log_model`, `save_model`, `load_model`, and a `python_function` beside it.

In the model's directory, `sparktorch/` holds the plain files of the artifact and two more:
`model.json` (class, uid and Params of the Spark model) and `columns.json` (for the pyfunc). Where
`torch.export` captures the module's graph, `data/model.pt2` holds it for MLflow's own `pytorch` flavour.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import sparktorch
from sparktorch.errors import PersistenceError
from sparktorch.program import ExportError, export_whole
from sparktorch.tracking.signature import signature_of, zeros_for

if TYPE_CHECKING:
    from mlflow.models import Model
    from mlflow.models.model import ModelInfo

    from sparktorch.ml.model import TorchModelBase

__all__ = ["FLAVOR_NAME", "load_model", "log_model", "save_model"]

_LOG = logging.getLogger(__name__)

FLAVOR_NAME = "sparktorch"
_DATA = "sparktorch"


def log_model(
    model: TorchModelBase,
    name: str = "model",
    *,
    registered_model_name: str | None = None,
    code_paths: list[str] | None = None,
    allow_pickle: bool = False,
    pytorch: bool = True,
    **kwargs: Any,
) -> ModelInfo:
    """Logs a fitted model to the active MLflow run.

    Args:
        model: What `fit` returned.
        name: The model's name in the run.
        registered_model_name: Registers the model under this name.
        code_paths: Files and folders of code to keep beside the model; by default the file or
            package that the module comes from, if it is not an installed one.
        allow_pickle: Whether a module may be pickled that has no import path nor a graph to export.
        pytorch: Whether to add the `pytorch` flavour, where the graph exports; it holds the weights
            a second time.
        kwargs: Passed to `save_model` (`input_example=`, `pip_requirements=`) and to
            `mlflow.models.Model.log`: `step=`, `model_id=`, `metadata=`, ...

    Raises:
        PersistenceError: The module could only be pickled, and `allow_pickle` is not set.
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
        pytorch=pytorch,
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
    pytorch: bool = True,
    input_example: Any = None,
    pip_requirements: list[str] | None = None,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Saves a fitted model as an MLflow model in a new local directory.

    Args:
        sparktorch_model: What `fit` returned.
        path: The directory to make.
        mlflow_model: The MLflow model to fill in; MLflow passes it.
        code_paths: As for `log_model`.
        allow_pickle: As for `log_model`.
        pytorch: As for `log_model`.
        input_example: A pandas DataFrame with the input columns; by default two rows of zeros.
        pip_requirements: Replaces the pinned requirements.
        metadata: What MLflow is to keep with the model.

    Raises:
        PersistenceError: The module could only be pickled, and `allow_pickle` is not set.
    """
    from mlflow import pyfunc
    from mlflow.models import Model
    from mlflow.models.model import MLMODEL_FILE_NAME
    from mlflow.models.utils import _save_example
    from mlflow.utils.environment import _mlflow_conda_env, _PythonEnv
    from mlflow.utils.model_utils import _validate_and_copy_code_paths, _validate_and_prepare_target_save_path

    from sparktorch.ml.io import write_local

    _validate_and_prepare_target_save_path(path)
    trained = sparktorch_model.trained
    own = [file for value in (trained.source, trained.preprocess) if value is not None for file in _code_of(value)]
    code = _validate_and_copy_code_paths(code_paths or list(dict.fromkeys(own)), path)
    data = Path(path) / _DATA
    data.mkdir()
    write_local(sparktorch_model, data, allow_pickle=allow_pickle)
    inputs = [name for spec in sparktorch_model._inputs() for name in spec.sources or (spec.column,)]
    _, outputs = sparktorch_model._fields()
    columns = {
        "inputs": inputs,
        "outputs": {field: name for name, field in outputs.items()},
    }
    (data / "columns.json").write_text(json.dumps(columns))

    mlflow_model = mlflow_model or Model()
    if mlflow_model.signature is None:
        mlflow_model.signature = signature_of(sparktorch_model, outputs)
    if metadata is not None:
        mlflow_model.metadata = metadata
    _save_example(mlflow_model, zeros_for(sparktorch_model) if input_example is None else input_example, path)
    requirements = pip_requirements or _requirements()
    files = {"conda_env": "conda.yaml", "python_env": "python_env.yaml"}
    pyfunc.add_to_model(mlflow_model, loader_module="sparktorch.tracking.pyfunc", data=_DATA, code=code, **files)
    mlflow_model.add_flavor(FLAVOR_NAME, version=sparktorch.__version__, data=_DATA, code=code)
    if pytorch:
        _add_pytorch(mlflow_model, sparktorch_model, Path(path), code)
    mlflow_model.save(os.path.join(path, MLMODEL_FILE_NAME))
    _mlflow_conda_env(path=os.path.join(path, files["conda_env"]), additional_pip_deps=requirements)
    _PythonEnv.current().to_yaml(os.path.join(path, files["python_env"]))
    (Path(path) / "requirements.txt").write_text("\n".join(requirements) + "\n")


def load_model(model_uri: str, *, allow_pickle: bool = False) -> Any:
    """Loads a model from MLflow as the Spark model that was logged.

    The code that was kept beside it goes to the executors of the active session, too.

    Args:
        model_uri: `models:/name/1`, `models:/name@alias`, `runs:/<run_id>/model`, or a path.
        allow_pickle: Whether pickled code may be run; only for models you trust.

    Raises:
        PersistenceError: The model is of another flavour, or holds pickled code.
    """
    from mlflow.models import Model
    from mlflow.tracking.artifact_utils import _download_artifact_from_uri
    from mlflow.utils.model_utils import _add_code_from_conf_to_system_path
    from pyspark.sql import SparkSession

    from sparktorch.ml.io import read_local
    from sparktorch.spark.files import send_code

    local = Path(_download_artifact_from_uri(artifact_uri=model_uri))
    conf = Model.load(str(local)).flavors.get(FLAVOR_NAME)
    if conf is None:
        raise PersistenceError(f"{model_uri} was not logged by sparktorch", hint="try mlflow.pyfunc.load_model")
    _add_code_from_conf_to_system_path(str(local), conf)
    spark = SparkSession.getActiveSession()
    if spark is not None and conf.get("code"):
        send_code(spark, local / conf["code"])
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


def _add_pytorch(mlflow_model: Model, model: TorchModelBase, path: Path, code: str | None) -> None:
    """Adds MLflow's `pytorch` flavour, if the module's graph can be exported."""
    try:
        archive = export_whole(model.module, model.trained.takes)
    except ExportError as error:
        _LOG.info("no pytorch flavour: %s", error)
        return
    (path / "data").mkdir()
    (path / "data" / "model.pt2").write_bytes(archive)
    mlflow_model.add_flavor("pytorch", model_data="data", pytorch_version=str(torch.__version__), code=code)


def _requirements() -> list[str]:
    """Pins what scoring needs; neither pyspark nor Java is among it."""
    from importlib.metadata import version

    names = ("mlflow", "numpy", "pandas", "pyarrow", "safetensors", "torch")
    pinned = [f"{name}=={version(name).partition('+')[0]}" for name in names]
    return [f"sparktorch-estimator=={sparktorch.__version__}", *pinned]
