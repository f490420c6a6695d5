"""The contract between DataFrame and ranks is a value."""

from __future__ import annotations

import json

import pytest

from sparktorch.data.columns import TensorSpec, plain_names, positions_of

SCALAR = TensorSpec(name="x0", column="age", dtype="int64")
IMAGE = TensorSpec(name="x1", column="pixels", dtype="float32", shape=(3, 8, 8))


@pytest.mark.parametrize(
    ("spec", "width", "described"),
    [
        (SCALAR, 1, "column 'age': int64 of shape (rows)"),
        (IMAGE, 192, "column 'pixels': float32 of shape (rows, 3, 8, 8)"),
    ],
)
def test_a_spec_says_what_a_column_becomes(spec: TensorSpec, width: int, described: str) -> None:
    assert spec.width == width
    assert spec.describe() == described
    assert TensorSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_packed_columns_are_found_between_others_among_the_columns_of_the_user() -> None:
    packed = TensorSpec(name="x0", column="a ... b", dtype="float32", shape=(2,), sources=("a", "b"), places=(0, 2))
    assert TensorSpec.from_dict(json.loads(json.dumps(packed.to_dict()))) == packed
    assert positions_of((packed, IMAGE, SCALAR)) == [0, 2, 1, 3]
    together = TensorSpec(name="x1", column="a ... b", dtype="float32", shape=(2,), sources=("a", "b"))
    assert positions_of((SCALAR, together, IMAGE)) == [0, 1, 2, 3]


def test_names_lose_their_backticks_unless_two_would_be_the_same() -> None:
    assert plain_names(["`a.b`", "`my``col`", "c.`d.e`", "f g"]) == ["a.b", "my`col", "c.d.e", "f g"]
    assert plain_names(["`a.b`", "a.b"]) == ["`a.b`", "a.b"]
    assert plain_names(["`a.b`", "c", "`a.b`"]) == ["a.b", "c", "a.b"]  # the same column twice
