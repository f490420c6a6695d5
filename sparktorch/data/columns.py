"""Which columns become which tensors: the contract between the DataFrame and the ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from sparktorch.base.batch import MASK
from sparktorch.base.config import at_least, one_of
from sparktorch.errors import ConfigError

if TYPE_CHECKING:
    from sparktorch.data.preprocess import Preprocess

__all__ = [
    "FOLD",
    "GROUP",
    "KEY",
    "LABEL",
    "ORDER",
    "VALIDATION",
    "WEIGHT",
    "Columns",
    "DType",
    "Groups",
    "InputOptions",
    "Layout",
    "TensorSpec",
    "Window",
    "argument_names",
    "carried_name",
    "input_name",
    "name_parts",
    "plain_names",
    "positions_of",
]

DType = Literal["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"]
Layout = Literal["dense", "sparse_csr", "padded", "jagged", "raw", "image"]

# These are the names of columns in the encoding. Specs have the user's column names too, for messages only.
LABEL = "y"
WEIGHT = "w"
VALIDATION = "v"
KEY = "k"
FOLD = "f"
GROUP = "g"
ORDER = "o"

# A part of a path is in backticks, where two backticks stand for one; or it has neither backticks nor dots.
_PART = re.compile(r"`((?:[^`]|``)+)`|([^`.]+)")


def input_name(index: int) -> str:
    """Returns the encoded column name of the input at `index`."""
    return f"x{index}"


def carried_name(index: int) -> str:
    """Returns the encoded column name of the carried column at `index`."""
    return f"c{index}"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One column as one argument of `forward`.

    Attributes:
        name: Column name in the encoding; `column` is the user's.
        shape: Shape of one row, `()` for a scalar; for ragged rows, shape of one element.
        kind: Name of the kind of column in `KINDS` of `data/fields/kinds.py`.
        lists: Length of the lists on each level, if it differs from `shape`; ragged rows begin with the second level.
        sources: The user's columns, if several scalar ones are packed into this one.
        places: Indices of `sources` among the user's columns; empty if they follow the columns of the specs before.
        fill: Replacement for nulls and NaN; `None` if rows that hold them are unfit.
        nulls: Whether `preprocess` gets nulls and NaN as they are, in an Arrow array, whatever `fill` says.
        limit: Maximum number of elements in a ragged row, the rest is cut off; `None` for no limit.
        pad: Value of the positions after the end of a padded row.
        resize: Whether images of another size are resized; otherwise they are an error.
        sql: Spark SQL type of a column that `preprocess` gets as it is, for which `dtype`, `shape` and `layout` say
            nothing; empty for other columns.
    """

    name: str
    column: str
    dtype: DType
    shape: tuple[int, ...] = ()
    kind: str = "number"
    layout: Layout = "dense"
    lists: tuple[int, ...] | None = None
    sources: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    fill: float | None = None
    nulls: bool = False
    limit: int | None = None
    pad: float = 0
    resize: bool = False
    sql: str = ""

    @property
    def width(self) -> int:
        """Number of values in one row; where rows are ragged, in one element of a row."""
        return math.prod(self.shape)

    @property
    def levels(self) -> tuple[int, ...]:
        """Length of the lists on each level of the encoded column."""
        return self.shape if self.lists is None else self.lists

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return self.layout in ("padded", "jagged")

    @property
    def takes_nulls(self) -> bool:
        """Whether rows may hold nulls and NaN."""
        return self.nulls or self.fill is not None

    @property
    def as_it_is(self) -> bool:
        """Whether rows stay what they are in Spark, of the type `sql`."""
        return bool(self.sql)

    def describe(self) -> str:
        """Returns `column 'x': float32 of shape (rows, 64)`."""
        if self.as_it_is:
            return f"column {self.column!r}: {self.sql}"
        inner = ("longest", *self.shape) if self.ragged else self.shape
        shape = ", ".join(("rows", *map(str, inner)))
        return f"column {self.column!r}: {self.dtype} of shape ({shape})"

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form, without default values except for the shape."""
        form: dict[str, Any] = {"name": self.name, "column": self.column, "dtype": self.dtype, "shape": self.shape}
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if attribute.default is not MISSING and value != attribute.default:
                form[attribute.name] = value
        return {name: list(value) if isinstance(value, tuple) else value for name, value in form.items()}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> TensorSpec:
        """Rebuilds a spec from `to_dict`."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in form.items()
        }
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """The user's options for input columns; mappings are by column name.

    Attributes:
        shapes: Shape of one row.
        layouts: The `Layout` of the tensor.
        dtypes: The `DType` of the tensor.
        limits: Maximum number of elements in a ragged row; the rest is cut off.
        pads: Value of the positions after the end of a padded row.
        assemble: Whether all scalar columns are packed into one tensor.
        fill: Replacement for nulls and NaN; `None` for none.
        drop: Whether rows with a null, NaN or infinity are dropped.
        as_they_are: Whether columns without options here are passed unchanged to `preprocess`.
        nulls: Whether nulls in such columns are passed unchanged, too.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    pads: Mapping[str, float] = field(default_factory=dict)
    assemble: bool = False
    fill: float | None = None
    drop: bool = False
    as_they_are: bool = False
    nulls: bool = False

    def __post_init__(self) -> None:
        for name, shape in self.shapes.items():
            if not shape or any(size < 1 for size in shape):
                raise ConfigError(
                    f"inputShapes[{name!r}] is {list(shape)}",
                    hint="give the length of every axis",
                    param="inputShapes",
                    code="ST-SHAPE",
                )
        for name, layout in self.layouts.items():
            one_of(f"inputLayouts[{name!r}]", layout, get_args(Layout))
        for name, dtype in self.dtypes.items():
            one_of(f"inputDtypes[{name!r}]", dtype, get_args(DType))
        for name, limit in self.limits.items():
            at_least(f"maxLengths[{name!r}]", limit, 1)

    def check_names(self, columns: Sequence[str]) -> None:
        """Refuses options for names that are no input column."""
        for param, options in self._by_param().items():
            for name in options:
                one_of(param, name, tuple(columns))

    def params_of(self, column: str) -> list[str]:
        """Returns the Params that have an option for a column."""
        return [param for param, options in self._by_param().items() if column in options]

    def _by_param(self) -> dict[str, Mapping[str, Any]]:
        """Returns the options by the Param that sets them."""
        return {
            "inputShapes": self.shapes,
            "inputLayouts": self.layouts,
            "inputDtypes": self.dtypes,
            "maxLengths": self.limits,
            "padValues": self.pads,
        }


@dataclass(frozen=True, kw_only=True)
class Window:
    """Samples that are windows: a fixed number of consecutive rows of a group.

    A label has the rows of the horizon. An argument of `forward` has the rows of the context or, if its future values
    are known, all rows of the window.

    Attributes:
        context: Number of rows before the predicted rows.
        horizon: Number of predicted rows, which are the last ones of a window.
        step: Number of rows from the start of a window to the start of the next; the last window ends with its group.
        known_ahead: Positions of the arguments of `forward` whose future values are known.
        even: SQL type and time zone of the order, if rows must follow each other in even steps; `None` for any steps.
    """

    context: int
    horizon: int
    step: int = 1
    known_ahead: tuple[int, ...] = ()
    even: tuple[str, str] | None = None

    @property
    def rows(self) -> int:
        """Number of rows in a window."""
        return self.context + self.horizon


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of a training set, whose rows stay together, and whether a sample is a whole group or a window of it.

    Attributes:
        group: The user's column; `None` if all rows are one group.
        order: The user's column that orders the rows of a group; `None` for any order.
        window: The windows that are samples; `None` if samples are whole groups.
    """

    group: str | None
    order: str | None = None
    window: Window | None = None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a training set.

    Attributes:
        inputs: The columns that become arguments of `forward`.
        label: The column of labels, or `None`.
        classes: Number of classes that the labels index; `None` if labels are not classes.
        ignored: The label that the loss leaves out of its mean, which no row may have; `None` if it leaves none out.
        weight: The column of sample weights, float32, or `None`.
        validation: The boolean column that marks validation rows, or `None`.
        drop_nulls: Whether rows with a null, NaN or infinity are dropped; otherwise they are an error.
        preprocess: Makes the arguments of `forward` from the inputs; `None` if the inputs are the arguments.
        keyed: Whether row keys cover all columns. Otherwise they cover the columns that are not digestible, if any, and
            the ranks add a digest of the others.
        folds: Whether the int column `FOLD` has the fold of each row in a cross-validation.
        carried: The user's numeric columns that evaluators compare with predictions, which are encoded as doubles.
        groups: The groups of the rows; `None` if each row is a sample.
        grades: Whether labels are grades, which are >= 0.
    """

    inputs: tuple[TensorSpec, ...]
    label: TensorSpec | None = None
    classes: int | None = None
    ignored: int | None = None
    weight: TensorSpec | None = None
    validation: str | None = None
    drop_nulls: bool = False
    preprocess: Preprocess | None = None
    keyed: bool = True
    folds: bool = False
    carried: tuple[str, ...] = ()
    groups: Groups | None = None
    grades: bool = False

    @property
    def marks(self) -> dict[str, str]:
        """The user's columns that say what a row is for, by their encoded names."""
        groups = self.groups or Groups(group=None)
        named = {VALIDATION: self.validation, GROUP: groups.group, ORDER: groups.order}
        return {name: column for name, column in named.items() if column is not None}

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every column that becomes a tensor."""
        return (*self.inputs, *(spec for spec in (self.label, self.weight) if spec is not None))

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the tensors that `forward` gets; `()` for `preprocess` until it has run on the sample row."""
        return argument_names(self.inputs) if self.preprocess is None else self.preprocess.arguments or ()


def argument_names(inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Returns the names of the tensors that columns become; the mask of a padded column is the attention mask."""
    names: list[str] = []
    for spec in inputs:
        names.append(spec.column)
        if spec.layout == "padded":
            names.append(MASK)
    return tuple(names)


def positions_of(inputs: Sequence[TensorSpec]) -> list[int]:
    """Returns the index of each column of the specs among the user's columns.

    The order is spec by spec, with the packed columns of a spec one by one.
    """
    count = sum(len(spec.sources) or 1 for spec in inputs)
    packed = {index for spec in inputs for index in spec.places}
    others = iter([index for index in range(count) if index not in packed])
    indices: list[int] = []
    for spec in inputs:
        indices += spec.places or islice(others, len(spec.sources) or 1)
    return indices


def name_parts(name: str) -> list[str]:
    """Returns the parts of a path into structs, parsed as by Spark; a name that is no path is one part."""
    parts: list[str] = []
    match = _PART.match(name)
    while match is not None:
        parts.append(match[2] or match[1].replace("``", "`"))
        end = match.end()
        if end == len(name):
            return parts
        match = _PART.match(name, end + 1) if name[end] == "." else None
    return [name]


def plain_names(names: Sequence[str]) -> list[str]:
    """Returns column names without the backticks that only Spark needs.

    If two of them would then be the same, all stay as they are.
    """
    plain = [".".join(name_parts(name)) for name in names]
    return plain if len(set(plain)) == len(set(names)) else list(names)
