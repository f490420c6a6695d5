"""Chooses the field that stores an input column."""

from __future__ import annotations

from sparktorch.data.columns import TensorSpec
from sparktorch.data.fields.arrow import ArrowColumn
from sparktorch.data.fields.base import Dense, Field, Ragged, Vectors
from sparktorch.data.fields.images import Images
from sparktorch.data.storage import RowStorage

__all__ = ["field_of"]


def field_of(spec: TensorSpec, storage: RowStorage) -> Field:
    """Returns an empty field for an input column."""
    if spec.kind == "any":
        return ArrowColumn(spec, storage)
    if spec.layout == "image":
        return Images(spec, storage)
    if spec.ragged:
        return Ragged(spec, storage)
    return Vectors(spec, storage) if spec.kind == "vector" else Dense(spec, storage)
