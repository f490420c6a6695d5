"""Import paths of objects, `"package.module:Name"`, and packages that not every user has."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparktorch.base.moved import earlier_name
from sparktorch.errors import ConfigError, ModuleError, nearest

__all__ = [
    "SHIPPING_HINT",
    "import_path",
    "is_object",
    "load_object",
    "matplotlib",
    "mlflow",
    "onnxscript",
    "optuna",
    "pillow",
    "transformers",
    "uncollected",
]

SHIPPING_HINT = (
    "it holds something that stays in this process (a lock, a file, a session): make that inside the "
    "module's __init__ and pass the class in place of an instance"
)


@contextmanager
def uncollected() -> Iterator[None]:
    """Context without garbage collection, for imports that create hundreds of thousands of objects and no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_object(path: str) -> Any:
    """Imports the object with the path `"package.module:attribute"`; a `ModuleError` says why it cannot."""
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise ModuleError(f"{path!r} is not an import path", hint="write it as 'package.module:Name'", code="ST-IMPORT")
    # `value` is the object that lacks `part`, if an attribute is missing.
    part = ""
    value = None
    try:
        value = importlib.import_module(name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        hint = "is the file on the Python path of this process? ship it with --py-files, or addArtifacts on Connect"
        if value is not None and not isinstance(error, ImportError):
            public_names = [name for name in dir(value) if not name.startswith("_")]
            hint = nearest(part, public_names, otherwise=hint)
        raise ModuleError(f"cannot import {path!r}: {error}", hint=hint, code="ST-IMPORT") from error
    return value


def is_object(value: Any, expected: Any) -> bool:
    """Whether a value is the expected object, or an import path of it, which may be that of an earlier version."""
    if not isinstance(value, str) or ":" not in value:
        return value is expected
    module, _, qualname = value.partition(":")
    expected_module = getattr(expected, "__module__", "")
    is_same_name = qualname == getattr(expected, "__qualname__", "")
    return is_same_name and module in (expected_module, earlier_name(expected_module))


def import_path(value: Any) -> str | None:
    """Returns the import path of an object; `None` if another process that imports it would not get the same object."""
    name = getattr(value, "__module__", None)
    qualname = getattr(value, "__qualname__", None)
    if not name or not qualname or name == "__main__" or "<" in qualname:
        return None
    path = f"{name}:{qualname}"
    try:
        return path if load_object(path) is value else None
    except ModuleError:
        return None


def pillow() -> Any:
    """Returns Pillow's module `PIL.Image`; a `ConfigError` says that it is not installed."""
    return _optional("PIL.Image", "images are decoded by Pillow", "images", "on the executors too")


def matplotlib() -> Any:
    """Returns the module `matplotlib.figure`, whose import takes a second; a `ConfigError` says that it is missing."""
    return _optional("matplotlib.figure", "figures are drawn by matplotlib", "", "on the driver alone")


def mlflow() -> Any:
    """Returns MLflow's module; a `ConfigError` says that it is not installed."""
    return _optional("mlflow", "jobs and their models are logged to MLflow", "mlflow", "on the driver alone")


def optuna() -> Any:
    """Returns Optuna's module; a `ConfigError` says that it is not installed."""
    return _optional("optuna", "the trials of a search are chosen by Optuna", "search", "on the driver alone")


def onnxscript() -> Any:
    """Returns the module by which torch writes ONNX; a `ConfigError` says that it is not installed."""
    return _optional("onnxscript", "torch writes ONNX with onnxscript", "onnx", "on the driver alone")


def transformers() -> Any:
    """Returns Hugging Face's module; a `ConfigError` says that it is not installed."""
    what = "models in folders and configurations are made by transformers"
    return _optional("transformers", what, "huggingface", "on the executors too")


def _optional(name: str, what: str, extra: str, where: str) -> Any:
    """Imports a module that need not be installed.

    If it is missing, the error says `what` needs it, and the hint which `extra` of this package, or which package,
    installs it, and `where`.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = f"sparktorch-estimator[{extra}]" if extra else name.partition(".")[0]
        hint = f"pip install {package}, {where}"
        raise ConfigError(f"{what}, which is not installed", hint=hint, code="ST-NOT-INSTALLED") from error
