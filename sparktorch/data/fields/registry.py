"""Chooses the field that stores an input column."""

from __future__ import annotations

from sparktorch.data.columns import TensorSpec
from sparktorch.data.fields.arrow import ArrowColumn
from sparktorch.data.fields.base import Dense, Field, Ragged, Vectors
from sparktorch.data.fields.images import Images
from sparktorch.data.storage import RowStorage

__all__ = ["field_class", "field_of"]


def field_class(spec: TensorSpec) -> type[ArrowColumn | Images | Ragged | Vectors | Dense]:
    """Returns the class of the field of an input column."""
    if spec.kind == "any":
        return ArrowColumn
    if spec.layout == "image":
        return Images
    if spec.ragged:
        return Ragged
    return Vectors if spec.kind == "vector" else Dense


def field_of(spec: TensorSpec, storage: RowStorage) -> Field:
    """Returns an empty field for an input column."""
    return field_class(spec)(spec, storage)
