"""The MLflow flavour: `log_model`, `save_model`, `load_model`, and a `python_function`.

In the model's directory, `sparktorch/` holds the plain files of the saved model, with `model.json` (class, uid
and Params of the Spark model), and `columns.json` (for the pyfunc). If `torch.export` can capture the module's
graph, `data/model.pt2` holds it for MLflow's own `pytorch` flavour.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import sparktorch
from sparktorch.errors import PersistenceError
from sparktorch.model.export import ExportError, export_whole
from sparktorch.tracking.requirements import is_installed, module_of, requirements
from sparktorch.tracking.series import series_example, series_signature
from sparktorch.tracking.signature import signature_of, zeros_for

if TYPE_CHECKING:
    from mlflow.models import Model, ModelSignature
    from mlflow.models.model import ModelInfo

    from sparktorch.ml.model import TorchModelBase

__all__ = ["FLAVOR_NAME", "load_model", "log_model", "save_model"]

_LOG = logging.getLogger(__name__)

FLAVOR_NAME = "sparktorch"
_DATA = "sparktorch"
_CONDA, _PYTHON = "conda.yaml", "python_env.yaml"


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
        code_paths: Files and folders of code to save with the model; by default the file or
            package of the module, unless it is installed.
        allow_pickle: Whether to pickle a module that has neither an import path nor an exportable graph.
        pytorch: Whether to add the `pytorch` flavour, if the graph can be exported; it stores the weights a second
            time, and is left out of a model that was fitted with `modelDir`.
        kwargs: Passed to `save_model` (`signature=`, `input_example=`, `conda_env=`, `pip_requirements=`,
            `extra_pip_requirements=`) and to `mlflow.models.Model.log`: `step=`, `model_id=`, `metadata=`, ...

    Raises:
        PersistenceError: The module could only be pickled, and `allow_pickle` is not set.
        TypeError: `model` is not a fitted model, or a keyword argument is unknown.
        ValueError: Several of `conda_env`, `pip_requirements` and `extra_pip_requirements` are given.
    """
    from mlflow.models import Model

    if not hasattr(model, "trained"):
        raise TypeError(
            f"log_model() takes a fitted model of sparktorch's, and got {type(model).__name__}; "
            "mlflow.spark.log_model logs a whole pipeline"
        )
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
    signature: ModelSignature | bool | None = None,
    input_example: Any = None,
    conda_env: dict[str, Any] | str | None = None,
    pip_requirements: list[str] | str | None = None,
    extra_pip_requirements: list[str] | str | None = None,
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
        signature: Replaces the signature from the model's columns; `False` for none.
        input_example: A pandas DataFrame with the input columns; by default two rows of zeros.
        conda_env: Replaces the environment, as a dict or the path of a YAML file.
        pip_requirements: Replaces the pinned requirements; a list, or the path of a requirements file.
        extra_pip_requirements: Added to the pinned requirements.
        metadata: Metadata that MLflow saves with the model.

    Raises:
        PersistenceError: The module could only be pickled, and `allow_pickle` is not set.
        ValueError: Several of `conda_env`, `pip_requirements` and `extra_pip_requirements` are given.
    """
    from mlflow import pyfunc
    from mlflow.models import Model
    from mlflow.models.model import MLMODEL_FILE_NAME
    from mlflow.models.utils import _save_example
    from mlflow.utils.environment import _process_conda_env, _process_pip_requirements, _validate_env_arguments
    from mlflow.utils.model_utils import _validate_and_copy_code_paths, _validate_and_prepare_target_save_path

    from sparktorch.ml.persistence import write_local

    _validate_env_arguments(conda_env, pip_requirements, extra_pip_requirements)
    trained = sparktorch_model.trained
    with _code_of(trained.source, trained.preprocess) as own:
        _check_place(path, own if code_paths is None else code_paths)
        _validate_and_prepare_target_save_path(path)
        code = _validate_and_copy_code_paths(code_paths or own, path)
    data = Path(path) / _DATA
    data.mkdir()
    write_local(sparktorch_model, data, allow_pickle=allow_pickle)
    derived, example = _write_columns(sparktorch_model, data)
    mlflow_model = mlflow_model or Model()
    if signature is not False:
        given = signature or mlflow_model.signature
        mlflow_model.signature = derived if given is None else given
    if metadata is not None:
        mlflow_model.metadata = metadata
    _save_example(mlflow_model, example if input_example is None else input_example, path)
    # The serving machine may differ from the cluster, so the Param `device` does not apply there.
    pyfunc.add_to_model(
        mlflow_model,
        loader_module="sparktorch.tracking.pyfunc",
        data=_DATA,
        code=code,
        model_config={"device": "auto"},
        conda_env=_CONDA,
        python_env=_PYTHON,
    )
    mlflow_model.add_flavor(FLAVOR_NAME, version=sparktorch.__version__, data=_DATA, code=code)
    if pytorch and isinstance(sparktorch_model.trained.weights, bytes):  # a graph would hold those in a folder
        _add_pytorch(mlflow_model, sparktorch_model, Path(path), code)
    mlflow_model.save(os.path.join(path, MLMODEL_FILE_NAME))
    if conda_env is None:
        environment = _process_pip_requirements(requirements(trained), pip_requirements, extra_pip_requirements)
    else:
        environment = _process_conda_env(conda_env)
    _write_environment(Path(path), *environment)


def _write_columns(model: TorchModelBase, data: Path) -> tuple[ModelSignature, Any]:
    """Writes the columns and scoring Params to `columns.json`; returns signature and input example."""
    from sparktorch.ml.tasks.forecasting_model import ForecastingModel

    if isinstance(model, ForecastingModel):
        (data / "columns.json").write_text(json.dumps({"series": model.columns.to_dict()}))
        return series_signature(model.columns), series_example(model.columns)
    inputs = [name for spec in model._inputs() for name in spec.sources or (spec.column,)]
    _, outputs = model._fields()
    columns = {
        "inputs": inputs,
        "outputs": {field: name for name, field in outputs.items()},
        "invalid": model.getHandleInvalid(),
        "thresholds": model._scoring().thresholds,
    }
    (data / "columns.json").write_text(json.dumps(columns))
    return signature_of(model, outputs), zeros_for(model)


def _check_place(path: str, code: Iterable[str]) -> None:
    """Refuses a target directory inside the code that is copied into it."""
    for root in code if isinstance(code, list) else ():  # MLflow refuses anything else
        if Path(path).resolve().is_relative_to(Path(root).resolve()):
            raise PersistenceError(
                f"{path} lies within {root}, whose code the model keeps a copy of",
                hint="save it elsewhere, or name the code that it needs with code_paths",
            )


def load_model(model_uri: str, *, allow_pickle: bool = False) -> Any:
    """Loads a model from MLflow as the Spark model that was logged.

    The code that was saved with it is also added to the executors of each session that uses the model.

    Args:
        model_uri: `models:/name/1`, `models:/name@alias`, `runs:/<run_id>/model`, or a path.
        allow_pickle: Whether pickled code may be run; only for models you trust.

    Raises:
        PersistenceError: The model is of another flavour, or holds pickled code, or this process has imported another
            version of its code.
    """
    from mlflow.models import Model
    from mlflow.tracking.artifact_utils import _download_artifact_from_uri
    from mlflow.utils.model_utils import _add_code_from_conf_to_system_path

    from sparktorch.ml.persistence import read_local
    from sparktorch.spark.shipping import add_code

    local = Path(_download_artifact_from_uri(artifact_uri=model_uri))
    conf = Model.load(str(local)).flavors.get(FLAVOR_NAME)
    if conf is None:
        raise PersistenceError(f"{model_uri} was not logged by sparktorch", hint="try mlflow.pyfunc.load_model")
    _add_code_from_conf_to_system_path(str(local), conf)
    code = local / conf["code"] if conf.get("code") else None
    model = read_local(local / conf["data"], allow_pickle=allow_pickle, code=code)
    if code is not None:
        add_code(code)
    return model


@contextmanager
def _code_of(*sources: Any) -> Iterator[list[str]]:
    """Yields the files and package folders that the sources come from, unless they are installed.

    Code imported from a zip, as with --py-files, is unpacked until the block ends.
    """
    with tempfile.TemporaryDirectory(prefix="sparktorch-code-") as unpacked:
        found = [_own_code(source, Path(unpacked)) for source in sources if source is not None]
        yield list(dict.fromkeys(str(path) for path in found if path is not None))


def _own_code(source: Any, unpacked: Path) -> Path | None:
    """Returns the file or package folder of one source; `None` if it is installed or has no file."""
    name = module_of(source)
    if name in ("__main__", "builtins"):
        return None
    top = importlib.import_module(name.partition(".")[0])
    folders = list(getattr(top, "__path__", ()))  # of a package, including namespace packages
    place = Path(folders[0] if folders else getattr(top, "__file__", None) or "")
    if place == Path() or is_installed(place):
        return None
    if place.exists():
        return place
    archive = next((folder for folder in place.parents if zipfile.is_zipfile(folder)), None)
    if archive is None:
        return None
    inside = place.relative_to(archive)
    with zipfile.ZipFile(archive) as files:
        members = [member for member in files.namelist() if Path(member).is_relative_to(inside)]
        files.extractall(unpacked, members)
    return unpacked / inside


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


def _write_environment(path: Path, conda: dict[str, Any], listed: list[str], constraints: list[str] | None) -> None:
    """Writes the environment files of MLflow's own flavours."""
    import yaml
    from mlflow.utils.environment import _PythonEnv

    (path / _CONDA).write_text(yaml.safe_dump(conda, default_flow_style=False))
    (path / "requirements.txt").write_text("\n".join(listed) + "\n")
    if constraints:
        (path / "constraints.txt").write_text("\n".join(constraints) + "\n")
    _PythonEnv.current().to_yaml(str(path / _PYTHON))
