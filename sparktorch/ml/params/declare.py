"""Params declared once: a line of a table becomes the Param, its accessors and an argument of the constructor."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from sparktorch.errors import nearest

__all__ = ["ParamSpec", "described", "params_class", "with_constructor"]

_MUTABLE = dict, list


@dataclass(frozen=True)
class ParamSpec:
    """One Param.

    Attributes:
        name: As users write it.
        type: Annotation of its value; decides how values are converted.
        default: `None` where there is none.
        doc: What it means.
        compared: Whether a fit that goes on from a checkpoint must have the same value.
        field: The field of the configuration that gets the value, such as "config.batch_size"; empty where
            `ml/fit/translate.py` reads it by name.
        shared: Spark's mixin that declares the Param, if one does.
    """

    name: str
    type: str
    default: Any
    doc: str
    compared: bool
    field: str = ""
    shared: Any = None

    @property
    def accessor(self) -> str:
        """The name behind `get` and `set`."""
        return self.name[0].upper() + self.name[1:]

    @property
    def shown_default(self) -> Any:
        """The default as a signature can show it: `None` for lists and dicts."""
        return None if isinstance(self.default, _MUTABLE) else self.default


def params_class(name: str, table: Sequence[ParamSpec], doc: str, *bases: type[Params]) -> type[Params]:
    """Makes a mixin that declares the Params of a table, with getters, setters and defaults.

    Args:
        name: Of the class.
        table: What it declares; what a base declares already is left out.
        doc: Of the class.
        bases: Further bases.
    """
    known = {spec for base in bases for spec in dir(base)}
    own = [spec for spec in table if f"set{spec.accessor}" not in known]
    shared = [spec.shared for spec in own if spec.shared is not None]
    members: dict[str, Any] = {"__doc__": doc, "__module__": "sparktorch.ml.params.mixins"}
    for spec in own:
        if spec.shared is None:
            members[spec.name] = Param(Params._dummy(), spec.name, spec.doc, _converter(spec.type))
            members[f"get{spec.accessor}"] = _getter(spec)
        members[f"set{spec.accessor}"] = _setter(spec)
    return types.new_class(name, (*bases, *shared) or (Params,), {}, lambda namespace: namespace.update(members))


def with_constructor(kind: type[Params], table: Sequence[ParamSpec], *, arguments: bool) -> type[Params]:
    """Gives a class an `__init__` that sets the defaults of a table, and returns it.

    Args:
        kind: The class.
        table: All its Params.
        arguments: Whether the constructor takes their values, by name.
    """
    defaults = {spec.name: spec.default for spec in table if spec.default is not None}

    def __init__(self: Any, **values: Any) -> None:
        for name in values.keys() - signature.parameters.keys():
            hint = nearest(name, [spec.name for spec in taken])
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}: {hint}")
        super(kind, self).__init__()
        self._setDefault(**{name: own(value) for name, value in defaults.items()})
        self._set(**{name: value for name, value in values.items() if value is not None})

    keyword, itself = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    taken = table if arguments else ()
    named = [inspect.Parameter(s.name, keyword, default=s.shown_default, annotation=optional(s)) for s in taken]
    signature = inspect.Signature([itself, *named], return_annotation="None")
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__qualname__ = f"{kind.__name__}.__init__"
    __init__.__doc__ = described(taken)
    kind.__init__ = __init__  # type: ignore[method-assign]
    return kind


def described(table: Sequence[ParamSpec]) -> str:
    """Returns a constructor's docstring."""
    if not table:
        return "Makes a model without a module, for `load` to fill."
    lines = [f"    {spec.name}: {spec.doc[0].upper()}{spec.doc[1:]}." for spec in table]
    return "\n".join(["Sets Params by name; `None` leaves one at its default.", "", "Args:", *lines])


def optional(spec: ParamSpec) -> str:
    """Returns the annotation of a constructor's argument."""
    return spec.type if spec.type == "Any" or spec.shown_default is not None else f"{spec.type} | None"


def own(value: Any) -> Any:
    """Returns a list or dict as a copy, so that who appends to a default changes no other instance."""
    return copy.copy(value) if isinstance(value, _MUTABLE) else value


def _getter(spec: ParamSpec) -> Any:
    def get(self: Any) -> Any:
        return self.getOrDefault(spec.name)

    end = "." if spec.default is None else " or its default."
    return _named(get, f"get{spec.accessor}", f"Gets the value of `{spec.name}`{end}")


def _setter(spec: ParamSpec) -> Any:
    def set_value(self: Any, value: Any) -> Any:
        return self._set(**{spec.name: value})

    return _named(set_value, f"set{spec.accessor}", f"Sets the value of `{spec.name}`: {spec.doc}.")


def _named(function: Any, name: str, doc: str) -> Any:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _to_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a dict, got {type(value).__name__}")
    return dict(value)


def _to_dicts(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"expected a list of dicts, got {type(value).__name__}")
    return [_to_dict(item) for item in value]


def _by_column(convert: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def converter(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError(f"expected a dict by column name, got {type(value).__name__}")
        return {str(name): convert(item) for name, item in value.items()}

    return converter


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "bool": TypeConverters.toBoolean,
    "dict[str, Any]": _to_dict,
    "dict[str, float]": _by_column(TypeConverters.toFloat),
    "dict[str, int]": _by_column(TypeConverters.toInt),
    "dict[str, list[int]]": _by_column(TypeConverters.toListInt),
    "dict[str, str]": _by_column(TypeConverters.toString),
    "float": TypeConverters.toFloat,
    "int": TypeConverters.toInt,
    "list[Any]": TypeConverters.toList,
    "list[dict[str, Any]]": _to_dicts,
    "list[str]": TypeConverters.toListString,
    "str": TypeConverters.toString,
}
_UNCONVERTED = "Any", "str | Callable[..., Any]", "str | list[float]"


def _converter(kind: str) -> Callable[[Any], Any] | None:
    return None if kind in _UNCONVERTED else _CONVERTERS[kind]
