"""Makes Params from tables: each entry becomes a Param, its accessors and a constructor argument."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from pyspark.ml.param import Param, Params, TypeConverters

from sparktorch.errors import nearest

__all__ = [
    "ParamSpec",
    "changed",
    "declared",
    "described",
    "input_names",
    "only",
    "params_class",
    "with_constructor",
    "without",
]

_MUTABLE = dict, list


@dataclass(frozen=True)
class ParamSpec:
    """One Param.

    Attributes:
        name: The camelCase name.
        type: Annotation of its value; selects the converter.
        default: The default, or `None`.
        doc: The description.
        compared: Whether resuming from a checkpoint requires the same value. Checkpoints of versions without the Param
            lack it: "unless default" leaves its default out of them.
        field: The configuration field that gets the value, such as "config.batch_size"; empty if
            `ml/fit/translate.py` reads the Param by name.
        shared: Spark's mixin that declares the Param, if there is one.
        columns: Which columns it names, if it names some that are there: "inputs", which scoring reads, too, or those
            that a "fit" alone reads.
        brought: What a LightningModule has in its place, if it has something.
    """

    name: str
    type: str
    default: Any
    doc: str
    compared: bool | Literal["unless default"]
    field: str = ""
    shared: Any = None
    columns: Literal["", "inputs", "fit"] = ""
    brought: str = ""

    @property
    def accessor(self) -> str:
        """The name after `get` and `set`."""
        return self.name[0].upper() + self.name[1:]

    @property
    def shown_default(self) -> Any:
        """The default in signatures: `None` for lists and dicts."""
        return None if isinstance(self.default, _MUTABLE) else self.default


def only(table: Sequence[ParamSpec], *names: str) -> tuple[ParamSpec, ...]:
    """Returns the Params of a table that have these names."""
    return tuple(spec for spec in table if spec.name in names)


def without(table: Sequence[ParamSpec], *names: str) -> tuple[ParamSpec, ...]:
    """Returns the Params of a table that have other names."""
    return tuple(spec for spec in table if spec.name not in names)


def changed(table: Sequence[ParamSpec], name: str, **fields: Any) -> tuple[ParamSpec, ...]:
    """Returns a table in which one Param has another default, or another doc."""
    return tuple(replace(spec, **fields) if spec.name == name else spec for spec in table)


class _Explained(Params):
    def explainParam(self, param: str | Param[Any]) -> str:
        """Explains a Param: its name, its doc, its default and its value. pyspark's method fails for a tuple."""
        resolved: Param[Any] = self._resolveParam(param)
        values = []
        for title, param_map in (("default", self._defaultParamMap), ("current", self._paramMap)):
            if resolved in param_map:
                values.append(f"{title}: {param_map[resolved]}")
        return f"{resolved.name}: {resolved.doc} ({', '.join(values) or 'undefined'})"


def params_class(module: str, name: str, table: Sequence[ParamSpec], doc: str, *bases: type[Params]) -> type[Params]:
    """Makes a mixin of a module that declares the Params of a table, with getters and setters.

    It leaves out those that its bases declare with the same type.
    """
    inherited = {name for base in bases for name in dir(base)}
    types_of = {spec.name: spec.type for base in bases for spec in getattr(base, "_table", ())}
    added = [
        spec
        for spec in table
        if f"set{spec.accessor}" not in inherited or types_of.get(spec.name, spec.type) != spec.type
    ]
    shared = [spec.shared for spec in added if spec.shared is not None]
    members: dict[str, Any] = {"__doc__": doc, "__module__": module}
    members["_table"] = tuple(table)
    for spec in added:
        if spec.shared is None:
            members[spec.name] = Param(Params._dummy(), spec.name, spec.doc, _converter(spec.type))
            members[f"get{spec.accessor}"] = _getter(spec)
        members[f"set{spec.accessor}"] = _setter(spec)
    for member in members.values():
        if callable(member):  # Pickle writes a function as its module and its qualified name.
            member.__module__, member.__qualname__ = members["__module__"], f"{name}.{member.__name__}"

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(members)

    # `type` would not resolve the metaclass of the bases.
    return types.new_class(name, (*(bases or (_Explained,)), *shared), {}, fill)


def declared(module: str, name: str, table: Sequence[ParamSpec], base: type[Params], *, of: str = "") -> type[Params]:
    """Makes the mixin of an estimator or a model, which is called as the mixin is, or `of`, with its constructor."""
    kind = params_class(module, name, table, f"The Params of `{of or name.removesuffix('Params')}`.", base)
    return with_constructor(kind, table, arguments=not name.endswith("ModelParams"))


def with_constructor(kind: type[Params], table: Sequence[ParamSpec], *, arguments: bool) -> type[Params]:
    """Gives a class an `__init__` that sets the defaults of all its Params, and returns it.

    With `arguments`, the constructor takes the Params as keyword arguments.
    """
    defaults = {spec.name: spec.default for spec in table if spec.default is not None}

    def __init__(self: Any, *positional: Any, **values: Any) -> None:
        constructor = f"{type(self).__name__}()"
        if positional:
            takes = f"takes Params by name, such as {names[0]}=..., and not by place" if names else "takes no arguments"
            raise TypeError(f"{constructor} {takes}")
        for name in values:
            if name not in names:
                hint = f": {nearest(name, names)}" if names else ""
                raise TypeError(f"{constructor} got an unexpected keyword argument {name!r}{hint}")
        self._input_kwargs = values  # pyspark's `keyword_only` leaves them there, too.
        super(kind, self).__init__()
        self._setDefault(**{name: separate_copy(value) for name, value in defaults.items()})
        self._set(**{name: value for name, value in values.items() if value is not None})

    accepted = table if arguments else ()
    names = [spec.name for spec in accepted]
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for spec in accepted:
        keyword, default = inspect.Parameter.KEYWORD_ONLY, spec.shown_default
        parameters.append(inspect.Parameter(spec.name, keyword, default=default, annotation=optional(spec)))
    # Signatures are for `help`; the interpreter itself goes by `*positional` and `**values`.
    __init__.__signature__ = inspect.Signature(parameters, return_annotation="None")  # type: ignore[attr-defined]
    __init__.__annotations__ = {**{spec.name: optional(spec) for spec in accepted}, "return": None}
    __init__.__qualname__ = f"{kind.__name__}.__init__"
    __init__.__doc__ = described(accepted)
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


def separate_copy(value: Any) -> Any:
    """Returns a copy of a list or dict and those within it, so that changing one affects no other instance."""
    if type(value) is dict:
        return {key: separate_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(separate_copy, value))
    return copy.copy(value) if isinstance(value, _MUTABLE) else value


def _getter(spec: ParamSpec) -> Any:
    def get(self: Any) -> Any:
        # An instance that was pickled before there was this Param lacks its default.
        if spec.default is not None and not self.isDefined(spec.name):
            return separate_copy(spec.default)
        return self.getOrDefault(spec.name)

    end = "." if spec.default is None else " or its default."
    get.__annotations__ = {"return": spec.type}
    return _with_name(get, f"get{spec.accessor}", f"Gets the value of `{spec.name}`{end}")


def _setter(spec: ParamSpec) -> Any:
    def set_value(self: Any, value: Any) -> Any:
        return self._set(**{spec.name: value})

    set_value.__annotations__ = {"value": spec.type}
    return _with_name(set_value, f"set{spec.accessor}", f"Sets the value of `{spec.name}`: {spec.doc}.")


def _with_name(function: Any, name: str, doc: str) -> Any:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _to_dict(value: Any) -> dict[str, Any]:
    return dict(separate_copy(_checked(value, Mapping, "a dict")))


def _to_dicts(value: Any) -> list[dict[str, Any]]:
    return [_to_dict(item) for item in _checked(value, (list, tuple), "a list of dicts")]


def _by_column(convert: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    return {str(name): convert(item) for name, item in _checked(value, Mapping, "a dict by column name").items()}


def _checked(value: Any, kind: Any, title: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {title}, got {type(value).__name__}")
    return value


def _to_int_or_range(value: Any) -> int | tuple[int, int]:
    if not isinstance(value, (list, tuple)):
        return TypeConverters.toInt(value)
    if len(value) != 2:
        raise TypeError(f"expected a number, or the least and the most, got {value!r}")
    return TypeConverters.toInt(value[0]), TypeConverters.toInt(value[1])


def _to_float_or_str(value: Any) -> float | str:
    return value if isinstance(value, str) else TypeConverters.toFloat(value)


def _to_int_or_str(value: Any) -> int | str:
    return value if isinstance(value, str) else TypeConverters.toInt(value)


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "bool": TypeConverters.toBoolean,
    "dict[str, Any]": _to_dict,
    "dict[str, float]": partial(_by_column, TypeConverters.toFloat),
    "dict[str, int]": partial(_by_column, TypeConverters.toInt),
    "dict[str, list[int]]": partial(_by_column, TypeConverters.toListInt),
    "dict[str, str]": partial(_by_column, TypeConverters.toString),
    "float": TypeConverters.toFloat,
    "float | str": _to_float_or_str,
    "int": TypeConverters.toInt,
    "int | str": _to_int_or_str,
    "int | tuple[int, int]": _to_int_or_range,
    "list[Any]": TypeConverters.toList,
    "list[dict[str, Any]]": _to_dicts,
    "list[float]": TypeConverters.toListFloat,
    "list[str]": TypeConverters.toListString,
    "str": TypeConverters.toString,
}
_UNCONVERTED = "Any", "str | Callable[..., Any]", "str | list[float]"


def _converter(kind: str) -> Callable[[Any], Any] | None:
    return None if kind in _UNCONVERTED else _CONVERTERS[kind]


def input_names(instance: Any) -> list[str]:
    """Returns the input columns: `inputCols` where it is set, else `featuresCol`."""
    return list(instance.getInputCols()) if instance.isSet("inputCols") else [instance.getFeaturesCol()]
