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
    *("SHIPPING_HINT", "import_path", "is_object", "load_object", "uncollected"),
    *("matplotlib", "mlflow", "onnxscript", "optuna", "pillow", "transformers"),
]

SHIPPING_HINT = (
    "it holds something that stays in this process (a lock, a file, a session): make that inside the "
    "module's __init__ and pass the class in place of an instance"
)


@contextmanager
def uncollected() -> Iterator[None]:
    """Context without garbage collection, for imports that create hundreds of thousands of objects, and no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_object(path: str) -> Any:
    """Imports `"package.module:attribute"`; a `ModuleError` says why it cannot."""
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise ModuleError(f"{path!r} is not an import path", hint="write it as 'package.module:Name'", code="ST-IMPORT")
    part, value = "", None
    try:
        value = importlib.import_module(name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        ship = "is the file on the Python path of this process? ship it with --py-files, or addArtifacts on Connect"
        names = [] if value is None or isinstance(error, ImportError) else [n for n in dir(value) if n[0] != "_"]
        raise ModuleError(
            f"cannot import {path!r}: {error}", hint=nearest(part, names, otherwise=ship), code="ST-IMPORT"
        ) from error
    return value


def is_object(value: Any, expected: Any) -> bool:
    """Whether a value is the expected object, or an import path of it, also that of an earlier version."""
    if not isinstance(value, str) or ":" not in value:
        return value is expected
    module = getattr(expected, "__module__", "")
    named = value.partition(":")[2] == getattr(expected, "__qualname__", "")
    return named and value.partition(":")[0] in (module, earlier_name(module))


def import_path(value: Any) -> str | None:
    """Returns the import path of `value`, or `None` if importing it elsewhere would not return the same object."""
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
    try:
        return importlib.import_module(name)
    except ImportError as error:
        hint = f"pip install {f'sparktorch-estimator[{extra}]' if extra else name.partition('.')[0]}, {where}"
        raise ConfigError(f"{what}, which is not installed", hint=hint, code="ST-NOT-INSTALLED") from error
