"""Which columns become which tensors: the contract between the DataFrame and the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from sparktorch.base.config import at_least, one_of
from sparktorch.errors import ConfigError, nearest

if TYPE_CHECKING:
    from sparktorch.data.preprocess import Preprocess

__all__ = [
    "KEY",
    "LABEL",
    "VALIDATION",
    "WEIGHT",
    "Columns",
    "DType",
    "InputOptions",
    "Kind",
    "Layout",
    "TensorSpec",
    "input_name",
]

DType = Literal["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"]
Kind = Literal["number", "vector", "binary", "any"]
Layout = Literal["dense", "sparse_csr", "padded", "jagged", "raw", "image"]

# Names on the wire. The user's own names travel in the specs, for messages only.
LABEL = "y"
WEIGHT = "w"
VALIDATION = "v"
KEY = "k"


def input_name(index: int) -> str:
    """Returns the wire name of the input with that index."""
    return f"x{index}"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One column as one argument of `forward`.

    Attributes:
        name: The column's name on the wire.
        column: The column's name in the user's DataFrame.
        dtype: The tensor's dtype.
        shape: One row's shape, `()` for a scalar; of ragged rows, the shape of one element.
        kind: What arrives: numbers and (nested) lists of them, ML vectors, bytes, or anything.
        layout: What `forward` gets.
        lists: Length of the lists on each level where they differ from `shape`; of ragged rows, from
            the second level on.
        sources: The user's columns, where several scalar ones are packed into one.
        fill: What stands for a null and for NaN; `None` refuses them.
        limit: Number of elements after which ragged rows are cut off; `None` keeps them whole.
        pad: What ragged rows are padded with.
        resize: Whether images of another size are resized, and are no error.
        sql: The type of anything, in Spark's words; what it becomes is for a callable to say, and dtype,
            shape and layout say nothing.
    """

    name: str
    column: str
    dtype: DType
    shape: tuple[int, ...] = ()
    kind: Kind = "number"
    layout: Layout = "dense"
    lists: tuple[int, ...] | None = None
    sources: tuple[str, ...] = ()
    fill: float | None = None
    limit: int | None = None
    pad: float = 0
    resize: bool = False
    sql: str = ""

    @property
    def width(self) -> int:
        """Number of elements in one row; of ragged rows, in one element."""
        return math.prod(self.shape)

    @property
    def levels(self) -> tuple[int, ...]:
        """Length of the lists on each level as they arrive."""
        return self.shape if self.lists is None else self.lists

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return self.layout in ("padded", "jagged")

    @property
    def digestible(self) -> bool:
        """Whether a rank can make a digest of its rows at once: they are numbers, of one shape."""
        return self.kind == "vector" or (self.kind == "number" and not self.ragged)

    def describe(self) -> str:
        """Returns `column 'x': float32 of shape (rows, 64)`."""
        if self.kind == "any":
            return f"column {self.column!r}: {self.sql}"
        inner = ("longest", *self.shape) if self.ragged else self.shape
        shape = ", ".join(("rows", *map(str, inner)))
        return f"column {self.column!r}: {self.dtype} of shape ({shape})"

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form; what is as usual is left out."""
        form: dict[str, Any] = {"name": self.name, "column": self.column, "dtype": self.dtype, "shape": self.shape}
        for known in fields(self):
            value = getattr(self, known.name)
            if known.default is not MISSING and value != known.default:
                form[known.name] = value
        return {name: list(value) if isinstance(value, tuple) else value for name, value in form.items()}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> TensorSpec:
        """Rebuilds a spec from `to_dict`."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in form.items()}
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """What a user asks of the input columns, by the column's name where it is a mapping.

    Attributes:
        shapes: One row's shape.
        layouts: What `forward` gets.
        dtypes: The tensor's dtype.
        limits: Number of elements after which ragged rows are cut off.
        pads: What ragged rows are padded with.
        assemble: Whether all the scalar columns become one tensor.
        fill: What stands for a null and for NaN; `None` for nothing.
        drop: Whether rows with a null, NaN or infinity are left out.
        as_they_are: Whether columns of which nothing is asked here are left as they are, for a callable.

    Raises:
        ConfigError: A value is not one of those that there are.
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

    def __post_init__(self) -> None:
        for name, shape in self.shapes.items():
            if not shape or any(size < 1 for size in shape):
                raise ConfigError(
                    f"inputShapes[{name!r}] is {list(shape)}", hint="give the length of every axis", param="inputShapes"
                )
        for name, layout in self.layouts.items():
            one_of(f"inputLayouts[{name!r}]", layout, get_args(Layout))
        for name, dtype in self.dtypes.items():
            one_of(f"inputDtypes[{name!r}]", dtype, get_args(DType))
        for name, limit in self.limits.items():
            at_least(f"maxLengths[{name!r}]", limit, 1)

    def check_names(self, columns: Sequence[str]) -> None:
        """Refuses options of columns that are no inputs.

        Raises:
            ConfigError: The hint names the nearest input column.
        """
        for param, values in self._by_param().items():
            for name in values:
                if name not in columns:
                    raise ConfigError(
                        f"{param} names {name!r}, which is no input column", hint=nearest(name, columns), param=param
                    )

    def given_for(self, column: str) -> list[str]:
        """Returns the Params that say something of a column."""
        return [param for param, values in self._by_param().items() if column in values]

    def _by_param(self) -> dict[str, Mapping[str, Any]]:
        return {
            "inputShapes": self.shapes,
            "inputLayouts": self.layouts,
            "inputDtypes": self.dtypes,
            "maxLengths": self.limits,
            "padValues": self.pads,
        }


@dataclass(frozen=True, kw_only=True)
class Columns:
    """All the columns of a training set.

    Attributes:
        inputs: One spec per argument of `forward`, in order.
        label: The label; `None` for a training set without one.
        classes: Number of classes the labels index, `None` when labels are not classes.
        weight: The column of sample weights, float32, or `None`.
        validation: The boolean column that marks validation rows, or `None`.
        drop_nulls: Whether rows that hold a null, NaN or infinity are left out, and are no error.
        preprocess: Makes the arguments of `forward` of the inputs, in place of their specs.
        keyed: Whether the key of a row stands for the whole of it. Otherwise it stands for the columns that are not
            digestible, where there are any, and the ranks make a digest of the others.
    """

    inputs: tuple[TensorSpec, ...]
    label: TensorSpec | None = None
    classes: int | None = None
    weight: TensorSpec | None = None
    validation: str | None = None
    drop_nulls: bool = False
    preprocess: Preprocess | None = None
    keyed: bool = True

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every column that becomes a tensor."""
        return (*self.inputs, *(spec for spec in (self.label, self.weight) if spec is not None))
