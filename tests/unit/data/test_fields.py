"""The ways of keeping a column: whatever rows are asked for, they are those that arrived."""

from __future__ import annotations

import tempfile
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparktorch.data.columns import Columns, TensorSpec
from sparktorch.data.convert.checks import RowFilter
from sparktorch.data.fields.base import Field
from sparktorch.data.fields.kinds import kind_of
from sparktorch.data.storage import RowStorage, Runs
from sparktorch.errors import ColumnError

VECTOR = pa.struct({"size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())})

numbers = st.integers(-9, 9).map(float)
rows_of_any_length = st.lists(st.lists(numbers, max_size=5), max_size=12)


def spec_of(**more: Any) -> TensorSpec:
    return TensorSpec(**{"name": "x0", "column": "c", "dtype": "float32", **more})


def appended(spec: TensorSpec, storage: RowStorage, *batches: pa.Array) -> Field:
    """Returns a field of batches that are slices of longer ones."""
    field = kind_of(spec).field(spec, storage)
    for batch in batches:
        field.append(pa.concat_arrays([batch, batch, batch]).slice(len(batch), len(batch)))
    return field


def filled(spec: TensorSpec, *batches: pa.Array) -> Field:
    field = appended(spec, RowStorage(), *batches)
    field.finish()
    return field


class FromDisk:
    """A field on disk, whose rows are read when they are asked for."""

    def __init__(self, spec: TensorSpec, *batches: pa.Array) -> None:
        storage = RowStorage(tempfile.gettempdir(), budget=0)
        self._field, self.close = appended(spec, storage, *batches), storage.close

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._field.read(Runs.of(index.numpy()))
        rows = self._field.read(Runs.of(index.numpy()))  # any number of times
        self.close()
        return rows.take(torch.arange(len(index)))


def in_two(rows: list[Any], kind: pa.DataType) -> list[pa.Array]:
    return [pa.array(part, kind) for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :])]


def draw_index(data: st.DataObject, rows: int) -> list[int]:
    return data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9)) if rows else []


@settings(max_examples=60, deadline=None)
@given(
    rows=rows_of_any_length,
    limit=st.sampled_from([None, 1, 3]),
    kept=st.sampled_from([filled, FromDisk]),
    data=st.data(),
)
def test_ragged_rows_come_back_padded_or_jagged(
    rows: list[list[float]], limit: int | None, kept: Any, data: st.DataObject
) -> None:
    index = draw_index(data, len(rows))
    wanted = [rows[i][:limit] for i in index]
    batches = in_two(rows, pa.list_(pa.float32()))
    values, mask = kept(spec_of(layout="padded", limit=limit, pad=-1), *batches).take(
        torch.tensor(index, dtype=torch.int64)
    )
    longest = max([1, *map(len, wanted)])
    assert values.tolist() == [row + [-1] * (longest - len(row)) for row in wanted]
    assert mask.tolist() == [[True] * len(row) + [False] * (longest - len(row)) for row in wanted]
    if index:
        (nested,) = kept(spec_of(layout="jagged", limit=limit), *batches).take(torch.tensor(index))
        assert [row.tolist() for row in nested.unbind()] == wanted


def as_vector(row: list[float], sparse: bool) -> dict[str, Any]:
    if not sparse:
        return {"size": None, "indices": [], "values": row}
    held = [i for i, value in enumerate(row) if value]
    return {"size": len(row), "indices": held, "values": [row[i] for i in held]}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.lists(st.sampled_from([0.0, 0.0, 1.0, -2.0]), min_size=4, max_size=4), st.booleans())),
    kept=st.sampled_from([filled, FromDisk]),
    data=st.data(),
)
def test_vectors_come_back_dense_or_sparse_as_they_may_be_mixed(
    rows: list[Any], kept: Any, data: st.DataObject
) -> None:
    index = torch.tensor(draw_index(data, len(rows)), dtype=torch.int64)
    wanted = torch.tensor([row for row, _ in rows]).view(-1, 4)[index]
    batches = in_two([as_vector(*row) for row in rows], VECTOR)
    (dense,) = kept(spec_of(kind="vector", shape=(4,)), *batches).take(index)
    assert torch.equal(dense, wanted)
    (shaped,) = kept(spec_of(kind="vector", shape=(2, 2), lists=(4,)), *batches).take(index)
    assert torch.equal(shaped, wanted.view(-1, 2, 2))
    (sparse,) = kept(spec_of(kind="vector", shape=(4,), layout="sparse_csr"), *batches).take(index)
    assert sparse.layout == torch.sparse_csr
    assert torch.equal(sparse.to_dense(), wanted)


def test_sparse_vectors_stay_sparse_in_the_shard() -> None:
    width = 10_000
    row = {"size": width, "indices": [3, 70], "values": [1.0, 2.0]}
    field = filled(spec_of(kind="vector", shape=(width,)), pa.array([row] * 100, VECTOR))
    assert field.nbytes < 100 * 50
    assert field.part(98, 100)[0].sum(1).tolist() == [3.0, 3.0]


def test_what_is_null_is_filled() -> None:
    lists, nested = pa.list_(pa.float32()), pa.list_(pa.list_(pa.float32()))
    vector = {"size": 2, "indices": [1], "values": [5.0]}
    cases: list[tuple[TensorSpec, pa.Array, Any]] = [
        (spec_of(fill=7), pa.array([1, None, float("nan")], pa.float32()), [1, 7, 7]),
        (spec_of(fill=7, dtype="int64"), pa.array([1, None], pa.int64()), [1, 7]),
        (spec_of(fill=7, shape=(2,)), pa.array([[1, 2], None, [None, float("nan")]], lists), [[1, 2], [7, 7], [7, 7]]),
        (
            spec_of(fill=7, shape=(2, 1)),
            pa.array([[[1], [2]], None, [[None], [3]], [[4], None]], nested),
            [[[1], [2]], [[7], [7]], [[7], [3]], [[4], [7]]],
        ),
        (
            spec_of(fill=7, kind="vector", shape=(2,)),
            pa.array([vector, None, vector], VECTOR),
            [[0, 5], [7, 7], [0, 5]],
        ),
        (
            spec_of(fill=7, shape=(2, 1)),
            pa.array([[[4], None]], pa.large_list(pa.large_list(pa.float32()))),
            [[[4], [7]]],
        ),
        (
            spec_of(fill=7, kind="binary", layout="raw", shape=(2,), dtype="int16"),
            pa.array([b"\x01\0\x02\0", None], pa.binary()),
            [[1, 2], [7, 7]],
        ),
        (spec_of(fill=7, layout="padded"), pa.array([[1, None], None], lists), [[1, 7], [0, 0]]),
        (
            spec_of(fill=7, layout="padded", shape=(2,)),
            pa.array([[[1, None], None], [[3, 4]]], nested),
            [[[1, 7], [7, 7]], [[3, 4], [0, 0]]],
        ),
    ]
    for spec, column, expected in cases:
        assert filled(spec, column).part(0, len(column))[0].tolist() == expected, spec


def screened(batches: list[dict[str, Any]], *specs: TensorSpec, drop: bool) -> tuple[list[list[Any]], RowFilter]:
    screen = RowFilter(Columns(inputs=specs, drop_nulls=drop))
    passed, row = [], 0
    for values in batches:
        batch = pa.RecordBatch.from_pydict(values)
        passed.append(screen.rows_of(batch, first_row=row).column(0).to_pylist())
        row += batch.num_rows
    return passed, screen


def test_rows_that_are_unfit_are_left_out_and_counted_once() -> None:
    batches = [
        {
            "x0": pa.array([1.0, None, 3.0], pa.float32()),
            "x1": pa.array([[1.0], [None], [2.0]], pa.list_(pa.float32())),
        },
        {"x0": pa.array([4.0, 5.0], pa.float32()), "x1": pa.array([None, [float("inf")]], pa.list_(pa.float32()))},
        {"x0": pa.array([6.0], pa.float32()), "x1": pa.array([[1.0]], pa.list_(pa.float32()))},
    ]
    specs = spec_of(), spec_of(name="x1", column="d", shape=(1,))
    passed, screen = screened(batches, *specs, drop=True)
    screen.raise_for_unfit_rows()
    assert passed == [[1.0, 3.0], [], [6.0]]
    assert screen.dropped == 3
    _, screen = screened(batches, specs[1], drop=False)
    with pytest.raises(ColumnError, match=r"column 'd' has 2 rows with null values; .*: 1, 3") as caught:
        screen.raise_for_unfit_rows()
    assert caught.value.where == {"column": "d", "row": 1}
    assert caught.value.hint.endswith("or set nullPolicy='drop' or 'fill'")
    label = RowFilter(Columns(inputs=(specs[1],), label=specs[0]))
    label.rows_of(pa.RecordBatch.from_pydict({**batches[0], "x1": pa.array([[1.0]] * 3)}), first_row=0)
    with pytest.raises(ColumnError) as caught:
        label.raise_for_unfit_rows()
    assert caught.value.hint.endswith("or set nullPolicy='drop'")
    for role in ("label", "weight"):
        named = RowFilter(Columns(inputs=(), **{role: specs[0]}))  # type: ignore[arg-type]
        named.rows_of(pa.RecordBatch.from_pydict({"x0": pa.array([1, float("nan"), float("inf")])}), first_row=0)
        with pytest.raises(ColumnError, match="2 rows of column 'c' are NaN or infinite"):
            named.raise_for_unfit_rows()


def test_infinity_has_no_filling() -> None:
    values = {"x0": pa.array([1.0, float("nan"), float("inf"), float("-inf")], pa.float32())}
    _, screen = screened([values] * 3, spec_of(fill=0), drop=False)
    with pytest.raises(ColumnError, match=r"6 rows of column 'c' are infinite; .*: 2, 3, 6, \.\.\.") as caught:
        screen.raise_for_unfit_rows()
    assert caught.value.hint.startswith("drop or replace them before fit, or set nullPolicy='drop';")
    _, screen = screened([{"x0": pa.array([1.0, None, float("nan")], pa.float32())}], spec_of(fill=0), drop=False)
    screen.raise_for_unfit_rows()
