"""Code that is saved with a model: a process that has imported its classes from other files refuses the model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from sparktorch.errors import PersistenceError

__all__ = ["check_code", "fingerprints"]


def fingerprints(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each module in a folder, by the import name that it has if the folder is on the path."""
    digests = {}
    for file in folder.rglob("*.py"):
        name = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        digests[name] = sha256(file.read_bytes()).hexdigest()
    return digests


def check_code(code: Mapping[str, str], used: Iterable[Any]) -> None:
    """Refuses classes and functions if their file, or the file of a base class, is not as it was saved with the model.

    `code` has the fingerprints of the model's files, as from `fingerprints`.
    """
    # A class brings its base classes, a function itself.
    modules = {getattr(part, "__module__", None) for value in used for part in getattr(value, "__mro__", (value,))}
    for name in sorted(code.keys() & modules):
        module: Any = sys.modules[name]
        try:
            # Unlike reading the file, the loader also finds what is in a zip.
            content = module.__spec__.loader.get_data(module.__file__)
        except Exception:  # The module has no file, or the file is gone, so nothing can be compared.
            continue
        if sha256(content).hexdigest() != code[name]:
            raise PersistenceError(
                f"the model was saved with its module {name!r}, and this process has imported another of that name, "
                f"from {module.__file__}",
                hint="a Spark application runs one version of a module: load each version of the model in an "
                "application of its own, or give the changed module another name",
            )
