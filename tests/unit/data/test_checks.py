"""Which rows are unfit, and what an integer dtype cannot hold."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from sparktorch.data.columns import Columns, TensorSpec
from sparktorch.data.convert.checks import RowFilter, non_finite_mask, null_mask, refuse_nulls
from sparktorch.data.convert.sql_types import arrow_type
from sparktorch.data.convert.tensors import held, packed, to_numpy
from sparktorch.data.fields.kinds import kind_of
from sparktorch.errors import ColumnError

NAN, INF = float("nan"), float("inf")


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
    found = held(pa.array(values), dtype)
    whole = pa.list_(pa.int64()) if pa.types.is_list(found.type) else pa.int64()
    assert (found if found.type == pa.bool_() else found.cast(whole, safe=False)).to_pylist() == expected
    assert held(pa.array(values)[1:], dtype).null_count == sum(value is None for value in expected[1:])


def test_a_number_that_does_not_fit_is_refused_or_filled_and_never_wraps() -> None:
    column = held(pa.array([1.0, NAN]), "int64")
    with pytest.raises(ColumnError, match="null values") as caught:
        refuse_nulls(column, spec(dtype="int64"))
    assert "what int64 cannot hold, as NaN" in caught.value.hint
    assert to_numpy(column, spec(dtype="int64", fill=5)).tolist() == [1, 5]
    pair = spec(dtype="int64", sources=("a", "b"), shape=(2,), fill=0)
    assert packed([pa.array([1.0, NAN]), pa.array([3, 4])], pair).to_pylist() == [[1, 3], [None, 4]]


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
        screen.close()
    assert caught.value.where == {"column": "b", "row": 11}
