"""Import paths of objects, `"package.module:Name"`."""

from __future__ import annotations

import importlib
from typing import Any

from sparktorch.errors import ModuleError, nearest

__all__ = ["MOVED", "SHIPPING_HINT", "import_path", "load_object"]

# Modules by the names that saved models and estimators of earlier versions have for them.
MOVED = {
    "sparktorch.artifact": "sparktorch.model.trained_module",
    "sparktorch.config": "sparktorch.base.config",
    "sparktorch.data.pretrained": "sparktorch.train.huggingface.preprocess",
    "sparktorch.program": "sparktorch.model.export",
    "sparktorch.train.dryrun": "sparktorch.train.recipe.dry_run",
}

SHIPPING_HINT = (
    "it holds something that stays in this process (a lock, a file, a session): make that inside the "
    "module's __init__ and pass the class in place of an instance"
)


def load_object(path: str) -> Any:
    """Imports `"package.module:attribute"`; a `ModuleError` says why it cannot."""
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise ModuleError(f"{path!r} is not an import path", hint="write it as 'package.module:Name'")
    part, found = "", None
    try:
        found = importlib.import_module(MOVED.get(name, name))
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        ship = "is the file on the Python path of this process? ship it with --py-files, or addArtifacts on Connect"
        names = [] if found is None or isinstance(error, ImportError) else [n for n in dir(found) if n[0] != "_"]
        raise ModuleError(f"cannot import {path!r}: {error}", hint=nearest(part, names, otherwise=ship)) from error
    return found


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
