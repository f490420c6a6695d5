"""Python workers run the version of a module that they have imported first, as all of a Spark application do."""

from __future__ import annotations

import marshal
import sys
from types import CodeType
from typing import Any

from pyspark import SparkContext
from torch import nn

from sparktorch.base.imports import import_path, load_object
from sparktorch.errors import ConfigError, ModuleError

__all__ = ["check_version"]

_first: dict[tuple[str, str], dict[str, bytes]] = {}  # by application and module: the code of its first fit


def check_version(source: Any) -> None:
    """Refuses a class or function whose Python module was edited and imported again since its first fit."""
    try:
        found = load_object(source) if isinstance(source, str) else source
    except ModuleError:  # a folder, or what cannot be imported, as others say
        return
    kind = type(found) if isinstance(found, nn.Module) else found
    if import_path(kind) is None:  # is sent by value
        return
    application = getattr(SparkContext._active_spark_context, "applicationId", "")
    code = _code_of(kind.__module__)
    first = _first.setdefault((application, kind.__module__), code)
    if any(first[name] != code[name] for name in first.keys() & code.keys()):
        raise ConfigError(
            f"Python module {kind.__module__!r} has other code than in an earlier fit, and Python workers keep what "
            "they have imported",
            hint="start the Spark session again; or, while you edit it, define the class in the notebook, whose code "
            "is sent with each fit",
            param="module",
        )


def _code_of(module: str) -> dict[str, bytes]:
    """Returns the code of a module's functions and methods by name, without line numbers."""
    found = {}
    for value in list(vars(sys.modules[module]).values()):
        if getattr(value, "__module__", None) != module:
            continue
        for part in list(vars(value).values()) if isinstance(value, type) else [value]:
            code = getattr(part, "__code__", None)
            if isinstance(code, CodeType):
                found[part.__qualname__] = marshal.dumps(code.replace(co_firstlineno=1, co_linetable=b""), 2)
    return found
