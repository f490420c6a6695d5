"""Which columns become which tensors: the contract between the DataFrame and the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["KEY", "LABEL", "VALIDATION", "WEIGHT", "Columns", "DType", "TensorSpec", "input_name"]

DType = Literal["float32", "float64", "int64"]

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
    """One column as one tensor.

    Attributes:
        name: The column's name on the wire.
        column: The column's name in the user's DataFrame.
        dtype: The tensor's dtype.
        shape: One row's shape: `()` for a scalar column, `(width,)` for a list column.
    """

    name: str
    column: str
    dtype: DType
    shape: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Number of elements in one row."""
        return math.prod(self.shape)

    def describe(self) -> str:
        """Returns `column 'x': float32 of shape (rows, 64)`."""
        shape = ", ".join(("rows", *map(str, self.shape)))
        return f"column {self.column!r}: {self.dtype} of shape ({shape})"

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form."""
        return {"name": self.name, "column": self.column, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> TensorSpec:
        """Rebuilds a spec from `to_dict`."""
        return cls(**{**form, "shape": tuple(form["shape"])})


@dataclass(frozen=True, kw_only=True)
class Columns:
    """All the columns of a training set.

    Attributes:
        inputs: One spec per argument of `forward`, in order.
        label: The label; `None` for a training set without one.
        classes: Number of classes the labels index, `None` when labels are not classes.
        weight: The column of sample weights, float32, or `None`.
        validation: The boolean column that marks validation rows, or `None`.
    """

    inputs: tuple[TensorSpec, ...]
    label: TensorSpec | None = None
    classes: int | None = None
    weight: TensorSpec | None = None
    validation: str | None = None

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every column that becomes a tensor."""
        return (*self.inputs, *(spec for spec in (self.label, self.weight) if spec is not None))
