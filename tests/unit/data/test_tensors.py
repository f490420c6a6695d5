"""Arrow columns become arrays, or an error that names column and row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparktorch.data.columns import Columns, TensorSpec
from sparktorch.data.convert.checks import check_labels, check_weights, refuse_nulls
from sparktorch.data.convert.tensors import to_numpy
from sparktorch.errors import ColumnError

SCALAR = TensorSpec(name="x0", column="age", dtype="float32")
PAIR = TensorSpec(name="x0", column="position", dtype="float32", shape=(2,))
CLASSES = Columns(inputs=(), label=TensorSpec(name="y", column="kind", dtype="float64"), classes=3)
NUMBERS = Columns(inputs=(), label=TensorSpec(name="y", column="price", dtype="float32"))
TAGGED = Columns(inputs=(), label=TensorSpec(name="y", column="tags", dtype="int64", shape=(3,)))


def lists(*rows: Any, kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(rows, pa.list_(kind or pa.float32()))


@pytest.mark.parametrize(
    ("array", "spec", "expected"),
    [
        (pa.array([1, 2], pa.int16()), SCALAR, np.array([1, 2], np.float32)),
        (pa.array([True, False]), SCALAR, np.array([1, 0], np.float32)),
        (lists([1, 2], [3, 4], kind=pa.float64()), PAIR, np.array([[1, 2], [3, 4]], np.float32)),
        (pa.array([[1, 2]], pa.large_list(pa.float32())), PAIR, np.array([[1, 2]], np.float32)),
        (lists([9], [1, 2], None).slice(1, 1), PAIR, np.array([[1, 2]], np.float32)),
        (lists([1, 2], [3, 4]).slice(2), PAIR, np.empty((0, 2), np.float32)),
    ],
)
def test_a_column_becomes_rows_of_the_spec(array: pa.Array, spec: TensorSpec, expected: np.ndarray) -> None:
    found = to_numpy(array, spec)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(found, expected)


def vectors(*rows: dict[str, Any]) -> pa.Array:
    """ML vectors as Spark keeps them: type 0 sparse, 1 dense."""
    fields = {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())}
    return pa.array([{name: row.get(name) for name in fields} for row in rows], pa.struct(list(fields.items())))


DENSE = {"type": 1, "values": [1.0, 2.0]}
SPARSE = {"type": 0, "size": 2, "indices": [1], "values": [7.0]}
EMPTY = {"type": 0, "size": 2, "indices": [], "values": []}


def test_dense_and_sparse_vectors_mix_in_a_column_and_in_a_slice_of_it() -> None:
    column = vectors(SPARSE, DENSE, EMPTY, SPARSE, DENSE)
    expected = np.array([[0, 7], [1, 2], [0, 0], [0, 7], [1, 2]], np.float32)
    assert np.array_equal(to_numpy(column, PAIR), expected)
    assert np.array_equal(to_numpy(column.slice(1, 3), PAIR), expected[1:4])
    assert np.array_equal(to_numpy(column.take(pa.array([1, 4])), PAIR), expected[[1, 4]])


@pytest.mark.parametrize(
    ("array", "spec", "row", "message"),
    [
        (pa.array([1, None, None], pa.float32()), SCALAR, 1, "column 'age' has 2 rows with null values"),
        (lists([1, 2], None, [3, 4]), PAIR, 1, "column 'position' has 1 row with null values"),
        (lists([1, 2], [3, None], [None, 4]), PAIR, 1, "column 'position' has 2 rows with null values"),
        (lists([1, 2], [3, None]).slice(1), replace(PAIR, sources=("a", "b")), 0, "column 'b' has 1 row with null"),
        (lists(None), replace(PAIR, sources=("a", "position")), 0, "column 'position' has 1 row with null"),
        (vectors(DENSE, {**SPARSE, "size": 3}), PAIR, 1, "1 row of column 'position' does not hold 2 values"),
        # The total fits two values a row: reshaping alone would shift values between rows.
        (lists([1, 2], [3], [4, 5, 6]), PAIR, 1, "2 rows of column 'position' do not hold 2 values; the first of them"),
        (
            pa.array([[[1, 2], [3]], [[4], [5, 6], [7, 8]]], pa.list_(pa.list_(pa.float32()))),
            replace(PAIR, shape=(2, 2)),
            1,
            "1 row of column 'position' does not hold 2 values; the first of them has 3",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_named(array: pa.Array, spec: TensorSpec, row: int, message: str) -> None:
    refuse: Any = refuse_nulls if "null" in message else to_numpy
    with pytest.raises(ColumnError) as caught:
        refuse(array, spec, first_row=1_000)
    assert message in caught.value.what
    assert caught.value.where == {"column": spec.sources[-1] if spec.sources else spec.column, "row": 1_000 + row}
    lists = "not hold" in message and pa.types.is_list(array.type)
    assert ("'padded'" in caught.value.hint) == lists


def test_arrays_share_the_buffer_where_the_layout_allows() -> None:
    array = lists([1, 2], [3, 4])
    assert np.shares_memory(to_numpy(array, PAIR), array.values.to_numpy())


@pytest.mark.parametrize(("label", "shown"), [(3, "3"), (-0.25, "-0.25"), (1e300, "1e+300")])
def test_labels_that_are_no_classes_are_refused_with_an_example(label: float, shown: str) -> None:
    with pytest.raises(ColumnError) as caught:
        check_labels(np.array([0.0, label, 1.0]), CLASSES)
    assert caught.value.what == f"1 label in column 'kind' is not among classes 0 ... 2, for example {shown}"
    assert caught.value.where == {"column": "kind"}
    assert "StringIndexer" in caught.value.hint
    assert ("use 'skip'" in caught.value.hint) == (label == 3)  # as StringIndexer keeps labels that it has not seen


@pytest.mark.parametrize(
    ("columns", "labels", "says"),
    [
        (CLASSES, np.array([0.0, 1.0, 2.0]), "^1 label in column 'kind' is 1"),
        (TAGGED, np.array([[0, 1, 1], [0, 0, 0], [1, 2, 0]]), "^2 labels in column 'tags' are 1"),
    ],
)
def test_labels_that_the_loss_leaves_out_are_refused_because_it_is_divided_by_all(
    columns: Columns, labels: np.ndarray, says: str
) -> None:
    check_labels(labels, replace(columns, ignored=7))
    with pytest.raises(ColumnError, match=rf"{says}, the ignore_index of the loss(.|\n)*weightCol"):
        check_labels(labels, replace(columns, ignored=1))
    check_labels(np.array([1.0, 2.0]), replace(NUMBERS, ignored=1))  # values, no classes
    check_labels(labels[:0], replace(columns, ignored=1))


def test_weights_are_zero_or_more() -> None:
    check_weights(np.array([0, 0.5, 3], np.float32), SCALAR)
    with pytest.raises(ColumnError, match="2 weights in column 'age' are negative"):
        check_weights(np.array([-1, 0.5, -3], np.float32), SCALAR)
