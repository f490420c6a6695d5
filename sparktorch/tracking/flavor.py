"""The MLflow flavour: `log_model`, `save_model`, `load_model`, and a `python_function`.

In the model's directory, `sparktorch/` holds the plain files of the saved model, with `model.json` (class, uid
and Params of the Spark model), and `columns.json` (for the pyfunc). If `torch.export` can capture the module's
graph, `data/model.pt2` holds it for MLflow's own `pytorch` flavour. For a pipeline, `sparktorch/` has a folder for
each stage. For a pipeline with stages of Spark's, it has the columns only, and MLflow's own `spark` flavour writes the
stages.
"""

from __future__ import annotations

import importlib
import logging
import os
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import sparktorch
from sparktorch.data.preprocess import LoadedPreprocess
from sparktorch.errors import ModuleError, PersistenceError, SparkTorchError
from sparktorch.model.export import ExportError, export_whole

if TYPE_CHECKING:
    from mlflow.models import Model, ModelSignature
    from mlflow.models.model import ModelInfo
    from pyspark.ml import PipelineModel

    from sparktorch.ml.model import TorchModelBase
    from sparktorch.model.trained_module import TrainedModule

__all__ = ["FLAVOR_NAME", "load_model", "load_module", "log_model", "requirements", "save_model"]

_LOG = logging.getLogger(__name__)

FLAVOR_NAME = "sparktorch"
_DATA = "sparktorch"
_CONDA, _PYTHON = "conda.yaml", "python_env.yaml"
_SCORING = ("numpy", "pandas", "pyarrow", "safetensors", "torch")


def log_model(
    model: TorchModelBase | PipelineModel,
    name: str = "model",
    *,
    registered_model_name: str | None = None,
    code_paths: list[str] | None = None,
    allow_pickle: bool = False,
    pytorch: bool = True,
    **kwargs: Any,
) -> ModelInfo:
    """Logs a fitted model, or a fitted pipeline, to the active MLflow run.

    Args:
        model: What `fit` returned: a model, a `PipelineModel`, or the model of a search, whose best model is logged.
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
        PersistenceError: The module could only be pickled, and `allow_pickle` is not set; or a pipeline with stages of
            Spark's comes without an `input_example`, or from Spark Connect.
        TypeError: `model` is not a fitted model or pipeline, or a keyword argument is unknown.
        ValueError: Several of `conda_env`, `pip_requirements` and `extra_pip_requirements` are given.
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
    sparktorch_model: TorchModelBase | PipelineModel,
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
    """Saves a fitted model, or a fitted pipeline, as an MLflow model in a new local directory.

    Args:
        sparktorch_model: As for `log_model`.
        path: The directory to make.
        mlflow_model: The MLflow model to fill in; MLflow passes it.
        code_paths: As for `log_model`.
        allow_pickle: As for `log_model`.
        pytorch: As for `log_model`.
        signature: Replaces the signature from the model's columns; `False` for none.
        input_example: A DataFrame of pandas or Spark with the input columns; by default two rows of zeros. A pipeline
            with stages of Spark's needs one of raw rows, which says the types of its input columns. Of Spark's, the
            first five rows are saved.
        conda_env: Replaces the environment, as a dict or the path of a YAML file.
        pip_requirements: Replaces the pinned requirements; a list, or the path of a requirements file.
        extra_pip_requirements: Added to the pinned requirements.
        metadata: Metadata that MLflow saves with the model.

    Raises:
        PersistenceError, TypeError: As for `log_model`.
        ValueError: Several of `conda_env`, `pip_requirements` and `extra_pip_requirements` are given.
    """
    from mlflow import pyfunc
    from mlflow.models import Model
    from mlflow.models.model import MLMODEL_FILE_NAME
    from mlflow.models.utils import _save_example
    from mlflow.utils.environment import _process_conda_env, _process_pip_requirements, _validate_env_arguments
    from mlflow.utils.model_utils import _validate_and_prepare_target_save_path

    from sparktorch.tracking.stages import form_of

    _validate_env_arguments(conda_env, pip_requirements, extra_pip_requirements)
    form = form_of(sparktorch_model, input_example)
    models = [stage.trained for stage in form.ours]
    environment: Any
    if conda_env is None:
        pinned = requirements(models, *form.packages)
        environment = _process_pip_requirements(pinned, pip_requirements, extra_pip_requirements)
    else:
        environment = _process_conda_env(conda_env)
    mlflow_model = mlflow_model or Model()
    with _code_of(*(source for trained in models for source in (trained.source, trained.preprocess))) as found_paths:
        _check_target(path, found_paths if code_paths is None else code_paths)
        _validate_and_prepare_target_save_path(path)
        data = Path(path) / _DATA
        data.mkdir()
        code = form.write(data, mlflow_model, code_paths or found_paths, environment[0], allow_pickle=allow_pickle)
    if signature is not False:
        mlflow_model.signature = signature or mlflow_model.signature or form.signature()
    if metadata is not None:
        mlflow_model.metadata = metadata
    _save_example(mlflow_model, form.example(), path)
    pyfunc.add_to_model(
        mlflow_model,
        loader_module=form.loader,
        data=_DATA,
        code=code,
        model_config=form.config,
        conda_env=_CONDA,
        python_env=_PYTHON,
    )
    mlflow_model.add_flavor(FLAVOR_NAME, version=sparktorch.__version__, data=_DATA, code=code)
    # A graph would hold the weights that are in a folder.
    if pytorch and form.all_ours and len(models) == 1 and isinstance(models[0].weights, bytes):
        _add_pytorch(mlflow_model, models[0], Path(path), code)
    mlflow_model.save(os.path.join(path, MLMODEL_FILE_NAME))
    _write_environment(Path(path), *environment)


def requirements(models: Iterable[TrainedModule], *others: str) -> list[str]:
    """Returns the pinned requirements of scoring with models, without pyspark. MLflow adds itself.

    These are the libraries that every model needs, those that have the classes of the modules' parts, and `preprocess`,
    and those of the packages `others`.
    """
    packages = set(others).union(*map(_packages, models))
    names = [*_SCORING, *sorted({*_distributions(packages)} - {*_SCORING})]
    # A local version, such as 2.9.1+cpu, is on no index.
    pinned = [f"{name}=={version(name).partition('+')[0]}" for name in names]
    return [f"sparktorch-estimator=={sparktorch.__version__}", *pinned]


def _packages(trained: TrainedModule) -> set[str]:
    """Returns the names of the packages that have a model's code, installed or not."""
    modules = [_module_of(source) for source in (trained.source, trained.preprocess) if source is not None]
    with suppress(SparkTorchError):  # The weights may be in a folder that this process cannot read.
        modules += [kind.__module__ for part in trained.parts() for kind in type(part).__mro__]
    if isinstance(trained.preprocess, LoadedPreprocess):
        modules += trained.preprocess.libraries
    if any(spec.layout == "image" for spec in trained.inputs):
        modules.append("PIL")
    return {module.partition(".")[0] for module in modules}


def _distributions(packages: Iterable[str]) -> Iterator[str]:
    """Yields the libraries that install packages; a namespace may belong to many libraries, and is left out."""
    distributions = packages_distributions()
    for package in packages:
        with suppress(ValueError):  # A module that was run, and not imported, has no spec.
            spec = find_spec(package)
            if spec is not None and spec.origin and _is_installed(Path(spec.origin)):
                yield from distributions.get(package, ())


def _module_of(source: Any) -> str:
    """Returns the name of the module that defines an object, or its class; `source` may be an import path."""
    if isinstance(source, str):
        return source.partition(":")[0]
    name: str = getattr(source, "__module__", "__main__")
    return name


def _is_installed(path: Path) -> bool:
    """Whether the requirements cover the code in a path: an installed library, the standard library, or sparktorch."""
    path = path.resolve()
    folders = [*map(sysconfig.get_path, ("stdlib", "platstdlib")), str(Path(sparktorch.__file__).parent)]
    if any(path.is_relative_to(Path(folder).resolve()) for folder in folders):
        return True
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _check_target(path: str, code: Iterable[str]) -> None:
    """Refuses a target directory inside the code that is copied into it."""
    for root in code if isinstance(code, list) else ():  # MLflow refuses any other type.
        if Path(path).resolve().is_relative_to(Path(root).resolve()):
            raise PersistenceError(
                f"{path} lies within {root}, whose code the model keeps a copy of",
                hint="save it elsewhere, or name the code that it needs with code_paths",
            )


def load_model(model_uri: str, *, allow_pickle: bool = False) -> Any:
    """Loads a model from MLflow as the Spark model, or the `PipelineModel`, that was logged.

    The code that was saved with it is also added to the executors of each session that uses the model.

    Args:
        model_uri: `models:/name/1`, `models:/name@alias`, `runs:/<run_id>/model`, or a path.
        allow_pickle: Whether pickled code may be run; only for models you trust.

    Raises:
        PersistenceError: The model is of another flavour, or holds pickled code, or this process has imported another
            version of its code.
    """
    from sparktorch.tracking.stages import read_own_stages, read_spark_stages

    local, flavors = _downloaded(model_uri)
    conf = flavors.get(FLAVOR_NAME)
    if conf is None:
        raise PersistenceError(
            f"{model_uri} was not logged by sparktorch", hint="try mlflow.pyfunc.load_model", code="ST-NOT-A-MODEL"
        )
    code = _add_code(local, conf)
    if "spark" in flavors:
        return read_spark_stages(local, allow_pickle=allow_pickle)
    return read_own_stages(local / conf["data"], allow_pickle=allow_pickle, code=code)


def load_module(model_uri: str) -> Any:
    """Loads the module of a model of MLflow's `pytorch` flavour, which runs its code.

    Raises:
        ModuleError: The model was logged by sparktorch.
        MlflowException: It is of another flavour.
    """
    import mlflow.pytorch

    local, flavors = _downloaded(model_uri)
    if FLAVOR_NAME in flavors:
        hint = f"sparktorch.tracking.load_model({model_uri!r}) returns it"
        raise ModuleError(f"{model_uri} is a model of sparktorch's already", hint=hint, param="module")
    _add_code(local, flavors.get("pytorch", {}))
    return mlflow.pytorch.load_model(str(local), map_location="cpu")  # This machine may have no GPU.


def _downloaded(model_uri: str) -> tuple[Path, dict[str, Any]]:
    """Returns a local folder of a model of MLflow's, and its flavours."""
    from mlflow.models import Model
    from mlflow.tracking.artifact_utils import _download_artifact_from_uri

    local = Path(_download_artifact_from_uri(artifact_uri=model_uri))
    return local, Model.load(str(local)).flavors


def _add_code(local: Path, conf: Mapping[str, Any]) -> Path | None:
    """Adds the code that a flavour has with it to the Python path, here and on the executors; returns its folder."""
    from mlflow.utils.model_utils import _add_code_from_conf_to_system_path

    from sparktorch.spark.shipping import add_code

    if not conf.get("code"):
        return None
    _add_code_from_conf_to_system_path(str(local), conf)
    add_code(local / conf["code"])
    return local / str(conf["code"])


@contextmanager
def _code_of(*sources: Any) -> Iterator[list[str]]:
    """Yields files and package folders of the sources that are not installed; out of a zip, they last for the block."""
    with tempfile.TemporaryDirectory(prefix="sparktorch-code-") as unpacked:
        paths = [_code_path(source, Path(unpacked)) for source in sources if source is not None]
        yield list(dict.fromkeys(str(path) for path in paths if path is not None))


def _code_path(source: Any, unpacked: Path) -> Path | None:
    """Returns the file or package folder of one source; `None` if it is installed or has no file."""
    name = _module_of(source)
    if name in ("__main__", "builtins"):
        return None
    top = importlib.import_module(name.partition(".")[0])
    folders = list(getattr(top, "__path__", ()))  # Packages have folders, and so have namespace packages.
    path = Path(folders[0] if folders else getattr(top, "__file__", None) or "")
    if path == Path() or _is_installed(path):
        return None
    if path.exists():
        return path
    # Spark imports code that it has shipped out of a zip: a path into an archive does not exist.
    archive = next((folder for folder in path.parents if zipfile.is_zipfile(folder)), None)
    if archive is None:
        return None
    inside = path.relative_to(archive)
    with zipfile.ZipFile(archive) as files:
        members = [member for member in files.namelist() if Path(member).is_relative_to(inside)]
        files.extractall(unpacked, members)
    return unpacked / inside


def _add_pytorch(mlflow_model: Model, trained: TrainedModule, path: Path, code: str | None) -> None:
    """Adds MLflow's `pytorch` flavour, if the module's graph can be exported."""
    try:
        archive = export_whole(trained.build(), trained.takes)
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
