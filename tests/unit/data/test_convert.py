"""Arrow columns become arrays, or an error that names column and row; what is unfit, and what a dtype cannot hold."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparktorch.data.columns import Columns, TensorSpec, plain_names, positions_of
from sparktorch.data.convert.checks import (
    RowFilter,
    check_labels,
    check_weights,
    non_finite_mask,
    null_mask,
    refuse_nulls,
)
from sparktorch.data.convert.sql_types import arrow_type
from sparktorch.data.convert.tensors import as_lists, nulls_for_misfits, pack, to_arrow, to_numpy
from sparktorch.data.fields.kinds import kind_of
from sparktorch.errors import ColumnError

SCALAR = TensorSpec(name="x0", column="age", dtype="float32")
PAIR = TensorSpec(name="x0", column="position", dtype="float32", shape=(2,))
CLASSES = Columns(inputs=(), label=TensorSpec(name="y", column="kind", dtype="float64"), classes=3)
NUMBERS = Columns(inputs=(), label=TensorSpec(name="y", column="price", dtype="float32"))
TAGGED = Columns(inputs=(), label=TensorSpec(name="y", column="tags", dtype="int64", shape=(3,)))
NAN, INF = float("nan"), float("inf")


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


def test_more_elements_than_32_bit_offsets_count_become_large_lists() -> None:
    width = 1 << 30
    column = to_arrow(np.zeros((2, width), np.uint8))  # its pages are never touched
    assert (column.type, len(column), len(column.values)) == (pa.large_list(pa.uint8()), 2, 2 * width)
    below = as_lists(pa.nulls(2 * width - 1), np.array([0, 5, 2 * width - 1]))
    above = as_lists(pa.nulls(2 * width), np.array([0, 5, 2 * width]))
    assert [one.type for one in (below, above)] == [pa.list_(pa.null()), pa.large_list(pa.null())]
    assert above.value_lengths().to_pylist() == [5, 2 * width - 5]


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
        (CLASSES, np.array([0.0, 1.0, 2.0]), "^1 row in column 'kind' holds 1"),
        (TAGGED, np.array([[0, 1, 1], [0, 0, 0], [1, 2, 0]]), "^2 rows in column 'tags' hold 1"),
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


def test_labels_and_weights_that_are_too_large_for_float32_are_refused() -> None:
    values = np.array([1.0, np.inf], np.float32)  # which a double of 1e39 becomes
    for check in (partial(check_weights, spec=SCALAR), partial(check_labels, columns=NUMBERS)):
        with pytest.raises(ColumnError, match=r"^1 row in column '\w+' is too large for float32") as caught:
            check(values)
        assert caught.value.hint.startswith("scale the numbers before fit: float32 holds up to 3.4e+38")


def spec(**more: object) -> TensorSpec:
    return TensorSpec(**{"name": "x0", "column": "x", "dtype": "float32", **more})  # type: ignore[arg-type]


STRUCT = pa.struct(
    {"indices": pa.list_(pa.int32()), "size": pa.int32(), "of": pa.struct({"v": pa.list_(pa.float64())})}
)


def test_nulls_and_nan_are_found_in_the_fields_of_a_users_struct() -> None:
    rows = [{"indices": [1], "size": 1, "of": {"v": [value]}} for value in (1.0, None, NAN, -INF)]
    column = pa.array([*rows, {"indices": None, "size": 1, "of": {"v": []}}, None], STRUCT)
    asked = spec(kind="any", sql="struct<...>")
    assert np.flatnonzero(null_mask(column, asked)).tolist() == [1, 4, 5]
    assert np.flatnonzero(non_finite_mask(column, asked)).tolist() == [2, 3]
    assert np.flatnonzero(non_finite_mask(column[1:], asked, nan=False)).tolist() == [2]
    assert null_mask(column[:1], asked) is None


def test_a_dense_vector_has_no_size_and_an_image_no_origin() -> None:
    vectors = pa.struct({"size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())})
    dense = pa.array([{"size": None, "indices": None, "values": [1.0, 2.0]}, None], vectors)
    assert np.flatnonzero(null_mask(dense, spec(kind="vector", shape=(2,)))).tolist() == [1]
    sent = pa.array([{"size": 2, "indices": [0], "values": [1.0]}, None], vectors)
    assert np.flatnonzero(null_mask(sent, spec(shape=(2,)))).tolist() == [1]  # vectors may score where arrays trained
    image = pa.struct({"origin": pa.string(), "data": pa.binary()})
    images = pa.array([{"origin": None, "data": b"a"}, {"origin": "x", "data": None}], image)
    assert np.flatnonzero(null_mask(images, spec(kind="binary", layout="image"))).tolist() == [1]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nan_in_raw_bytes_is_for_the_null_policy(dtype: str) -> None:
    rows = [np.array(values, dtype).tobytes() for values in ([1, 2], [NAN, 1], [1, INF])]
    asked = spec(kind="binary", layout="raw", dtype=dtype, shape=(2,))
    column = pa.array([*rows, b"123", None], pa.binary())
    assert np.flatnonzero(non_finite_mask(column, asked)).tolist() == [1, 2]
    assert np.flatnonzero(non_finite_mask(column[1:], asked, nan=False)).tolist() == [1]
    assert non_finite_mask(column[:0], asked) is None
    filled = spec(kind="binary", layout="raw", dtype=dtype, shape=(2,), fill=7.0)
    assert to_numpy(column[:2], filled).tolist() == [[1, 2], [7, 1]]


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1.5, NAN, 3e9, -3e9, None], "int32", [1, None, None, None, None]),
        ([2.0**63, -(2.0**63), INF], "int64", [None, -(2**63), None]),
        ([5_000_000_000, 7], "int32", [None, 7]),
        ([[1.0, NAN], None, [130.0]], "int8", [[1, None], None, [None]]),
        ([True, None], "int8", [True, None]),
        ([Decimal(2**53 + 1), Decimal(2**63 - 1), Decimal(2**63), None], "int64", [2**53 + 1, 2**63 - 1, None, None]),
        ([[Decimal("1.75")], [Decimal("-128.5"), Decimal(128)]], "int8", [[1], [-128, None]]),
    ],
)
def test_what_an_integer_dtype_cannot_hold_is_null(values: list[object], dtype: str, expected: list[object]) -> None:
    found = nulls_for_misfits(pa.array(values), dtype)
    whole = pa.list_(pa.int64()) if pa.types.is_list(found.type) else pa.int64()
    assert (found if found.type == pa.bool_() else found.cast(whole, safe=False)).to_pylist() == expected
    assert nulls_for_misfits(pa.array(values)[1:], dtype).null_count == sum(value is None for value in expected[1:])


def test_a_number_that_does_not_fit_is_refused_or_filled_and_never_wraps() -> None:
    column = nulls_for_misfits(pa.array([1.0, NAN]), "int64")
    with pytest.raises(ColumnError, match="null values") as caught:
        refuse_nulls(column, spec(dtype="int64"))
    assert "what int64 cannot hold, as NaN" in caught.value.hint
    assert to_numpy(column, spec(dtype="int64", fill=5)).tolist() == [1, 5]
    pair = spec(dtype="int64", sources=("a", "b"), shape=(2,), fill=0)
    assert pack([pa.array([1.0, NAN]), pa.array([3, 4])], pair).to_pylist() == [[1, 3], [None, 4]]


@pytest.mark.parametrize(
    ("values", "sql", "expected"),
    [
        ([7, 3_000_000_000], "int", [7, None]),
        ([7.9, NAN], "bigint", [7, None]),
        ([Decimal("1.5"), None], "double", [1.5, None]),
        ([True, None], "int", [1, None]),
    ],
)
def test_a_callable_gets_numbers_of_the_type_of_the_fit(values: list[object], sql: str, expected: list[object]) -> None:
    asked = spec(kind="any", sql=sql)
    found = kind_of(asked).as_fitted(pa.array(values), asked)
    assert (found.type, found.to_pylist()) == (arrow_type(sql), expected)


@pytest.mark.parametrize(
    ("bad", "said"), [(None, "column 'b' has 1 row with null values"), (NAN, "1 row of column 'b' is NaN")]
)
def test_of_packed_columns_the_one_that_is_unfit_is_named(bad: float | None, said: str) -> None:
    pair = spec(sources=("a", "b"), shape=(2,))
    screen = RowFilter(Columns(inputs=(pair,)))
    batch = pa.record_batch([pa.array([[1.0, 2.0], [3.0, bad], [5.0, 6.0]], pa.list_(pa.float32()))], ["x0"])
    screen.rows_of(batch, first_row=10)
    with pytest.raises(ColumnError, match=said) as caught:
        screen.raise_for_unfit_rows()
    assert caught.value.where == {"column": "b", "row": 11}


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("tinyint", pa.int8()),
        ("timestamp_ntz", pa.timestamp("us")),
        ("array<array<double>>", pa.list_(pa.list_(pa.float64()))),
        ("struct<>", pa.struct([])),
        (
            "array<struct<a:int,b:array<struct<c:string>>,d:boolean>>",
            pa.list_(pa.struct({"a": pa.int32(), "b": pa.list_(pa.struct({"c": pa.string()})), "d": pa.bool_()})),
        ),
        ("struct<`my-field`:int,`a:b,``>`:date>", pa.struct({"my-field": pa.int32(), "a:b,`>": pa.date32()})),
    ],
)
def test_a_type_is_read_however_deep(sql: str, expected: pa.DataType) -> None:
    assert arrow_type(sql) == expected


@pytest.mark.parametrize("sql", ["", "map<string,int>", "array<interval day>", "array<int"])
def test_what_is_no_such_type_is_refused(sql: str) -> None:
    with pytest.raises(ValueError, match="is no type of a column that a callable can take"):
        arrow_type(sql)


WHOLE = TensorSpec(name="x0", column="age", dtype="int64")
IMAGE = TensorSpec(name="x1", column="pixels", dtype="float32", shape=(3, 8, 8))


@pytest.mark.parametrize(
    ("spec", "width", "described"),
    [
        (WHOLE, 1, "column 'age': int64 of shape (rows)"),
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
    assert positions_of((packed, IMAGE, WHOLE)) == [0, 2, 1, 3]
    together = TensorSpec(name="x1", column="a ... b", dtype="float32", shape=(2,), sources=("a", "b"))
    assert positions_of((WHOLE, together, IMAGE)) == [0, 1, 2, 3]


def test_names_lose_their_backticks_unless_two_would_be_the_same() -> None:
    assert plain_names(["`a.b`", "`my``col`", "c.`d.e`", "f g"]) == ["a.b", "my`col", "c.d.e", "f g"]
    assert plain_names(["`a.b`", "a.b"]) == ["`a.b`", "a.b"]
    assert plain_names(["`a.b`", "c", "`a.b`"]) == ["a.b", "c", "a.b"]  # the same column twice
