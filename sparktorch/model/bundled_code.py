"""Code that is saved with a model. A process has one module of a name: if it is another, it refuses the model."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from sparktorch.errors import PersistenceError

__all__ = ["check_modules", "fingerprints"]


def fingerprints(folder: Path, used: Iterable[str] | None) -> dict[str, str]:
    """Returns the SHA-256 of the modules in a folder that a model uses, by import name.

    Args:
        folder: The folder, which would be on the Python path.
        used: Names of the modules that the model names; those that they import follow. `None` for all.
    """
    places = {path: path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")}
    files = {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in places.items()}
    found: dict[str, str] = {}
    left = list(files if used is None else used)
    while left:
        name = left.pop()
        if name in files and name not in found:
            content = files[name].read_bytes()
            found[name] = hashlib.sha256(content).hexdigest()
            package = name if files[name].stem == "__init__" else name.rpartition(".")[0]
            with suppress(SyntaxError, ImportError):  # its import says so
                left += _imports(content, package)
    return found


def check_modules(code: Mapping[str, str]) -> None:
    """Checks that what this process has imported is the code of a model.

    Args:
        code: The model's code, as from `fingerprints`.

    Raises:
        PersistenceError: A module of that name has other content.
    """
    for name in sorted(code.keys() & sys.modules.keys()):
        if _fingerprint(sys.modules[name]) != code[name]:
            raise PersistenceError(
                f"the model was saved with its module {name!r}, and this process has imported another of that name, "
                f"from {getattr(sys.modules[name], '__file__', None)}",
                hint="a Spark application runs one version of a module: load each version of the model in an "
                "application of its own, or give the changed module another name",
            )


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Yields the names that a module of a package imports, of modules or what is in them."""
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _fingerprint(module: Any) -> str | None:
    """Returns the SHA-256 of a module's file, also in a zip; `None` if it has none."""
    try:
        content: bytes = module.__spec__.loader.get_data(module.__file__)
    except (AttributeError, TypeError, OSError):
        return None
    return hashlib.sha256(content).hexdigest()
