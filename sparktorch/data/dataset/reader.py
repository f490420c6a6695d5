"""Reads the record batches of a partition into the shard of a rank, and checks every row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from sparktorch.base.no_op import no_op
from sparktorch.data.columns import GROUP, KEY, ORDER, VALIDATION, Columns, TensorSpec, carried_name
from sparktorch.data.convert.checks import RowFilter, check_labels, check_weights
from sparktorch.data.convert.sql_types import empty_value
from sparktorch.data.convert.tensors import packed
from sparktorch.data.dataset.base import Folds, Shard
from sparktorch.data.dataset.rows import Rows, SampledRows
from sparktorch.data.dataset.shards import InMemoryShard, OutOfCoreShard
from sparktorch.data.fields.base import Dense, Field
from sparktorch.data.fields.kinds import kind_of
from sparktorch.data.sampling.groups import GroupKeys
from sparktorch.data.sampling.row_keys import RowDigests, RowKeys
from sparktorch.data.storage import RowStorage
from sparktorch.errors import ColumnError

__all__ = ["balanced", "read_shard"]


def read_shard(
    batches: Iterable[pa.RecordBatch],
    columns: Columns,
    *,
    placeholder: pa.RecordBatch | None = None,
    storage: RowStorage | None = None,
    budget: int = 1 << 30,
    by_key: bool = True,
    by_length: bool = False,
    moved: Callable[[], object] = no_op,
) -> Shard:
    """Reads the record batches of one partition and checks every row.

    Args:
        batches: Record batches of the encoded columns and the int64 row key `k`, which may be missing unless
            `columns.keyed`.
        columns: Which columns become which tensors.
        placeholder: The placeholder row of a rank without rows; zeros by default.
        storage: Row storage; by default in memory.
        budget: Memory for rows from disk, in bytes.
        by_key: Whether the positions of the rows follow their keys; otherwise, their order of arrival. On disk, rows
            that arrive in the order of their positions, validation rows last, are read in runs; others one by one, with
            4 bytes of memory each.
        by_length: Whether the rows of a step are sorted by the length of the first ragged input.
        moved: It is called for what counts as progress, besides the batches that are taken.
    """
    storage = storage or RowStorage()
    fields = {spec.name: _field(spec, columns, storage) for spec in columns.tensors}
    try:
        grouped = columns.groups is not None
        row_keys = GroupKeys(storage, columns) if grouped else RowKeys(storage, by_key=by_key)
        folds = Folds([carried_name(position) for position in range(len(columns.carried))]) if columns.folds else None
        dropped = _read(batches, columns, fields, row_keys, folds)
        size = sum(field.nbytes for field in fields.values())
        if not row_keys.count:
            # The placeholder may have the label that the loss leaves out.
            without_ignored = replace(columns, ignored=None)
            fields = {spec.name: _field(spec, without_ignored, storage) for spec in columns.tensors}
            for spec in columns.tensors:
                fields[spec.name].append(_zeros(spec) if placeholder is None else placeholder.column(spec.name))
        count = max(1, row_keys.count)
        sizes: dict[str, Any] = {"count": count, "size": size}
        if isinstance(row_keys, GroupKeys):
            stored: Rows = SampledRows(fields, columns, storage, samples=row_keys.samples(moved), **sizes)
        else:
            stored = Rows(fields, columns, storage, by_length=by_length, **sizes)
        kind = OutOfCoreShard if storage.on_disk else InMemoryShard
        return kind(stored, row_keys, dropped=dropped, budget=budget, folds=folds)
    except BaseException:
        storage.close()
        raise


def _read(
    batches: Iterable[pa.RecordBatch],
    columns: Columns,
    fields: dict[str, Field],
    row_keys: RowKeys,
    folds: Folds | None,
) -> int:
    """Reads all batches into the fields; returns the number of rows that were dropped."""
    screen = RowFilter(columns)
    row = 0
    for batch in batches:
        rows = screen.rows_of(batch, first_row=row)
        digests = _digests(rows, columns)
        try:
            for spec in columns.tensors:
                added = digests if kind_of(spec).digestible(spec) else None
                fields[spec.name].append(rows.column(spec.name), first_row=row, digests=added)
        except ColumnError as error:
            raise screen.renumbered(error, first_row=row) from None
        if columns.validation:
            # The row filter has removed the rows with a null here; its `close` raises for them.
            held_out = rows.column(VALIDATION).fill_null(False).to_numpy(zero_copy_only=False)
        else:
            held_out = np.zeros(rows.num_rows, np.bool_)
        keys = rows.column(KEY).to_numpy() if digests is None else digests.finish()
        row_keys.append(keys, held_out)
        if isinstance(row_keys, GroupKeys):
            # Without an order, rows of a group follow their keys: any order does, if it is the same in each run.
            ordered = ORDER in rows.schema.names
            row_keys.append_to_groups(rows.column(GROUP).to_numpy(), rows.column(ORDER).to_numpy() if ordered else keys)
            if ordered and screen.unfit is not None:
                dropped = batch.select([GROUP, ORDER]).filter(pa.array(screen.unfit)).drop_null()
                row_keys.append_dropped(dropped.column(GROUP).to_numpy(), dropped.column(ORDER).to_numpy())
        if folds is not None:
            folds.append(rows, keys, held_out)
        row += batch.num_rows
    screen.close()
    return screen.dropped


def _digests(rows: pa.RecordBatch, columns: Columns) -> RowDigests | None:
    """Returns the row digests that the columns of a batch are added to; `None` if its keys cover all columns."""
    if columns.keyed:
        return None
    keys = rows.column(KEY).to_numpy() if KEY in rows.schema.names else np.zeros(rows.num_rows, np.int64)
    return RowDigests(keys.view(np.uint64))


def balanced(sums: Sequence[float]) -> list[float]:
    """Returns the class weights that balance the classes: `rows / (classes * rows of the class)`.

    `sums` has the number of rows, or the sum of their weights, by class. Classes without rows are not counted; their
    weight is 1, the mean over all rows.
    """
    present = sum(1 for count in sums if count)
    return [sum(sums) / (present * count) if count else 1.0 for count in sums]


def _field(spec: TensorSpec, columns: Columns, storage: RowStorage) -> Field:
    """Returns an empty field for a column; label and weight fields check their values."""
    if spec is columns.label:
        check = partial(check_labels, columns=columns)
        return Dense(spec, storage, check, dtype=None if columns.classes is None else np.int64)
    if spec is columns.weight:
        return Dense(spec, storage, partial(check_weights, spec=spec))
    return kind_of(spec).field(spec, storage)


def _zeros(spec: TensorSpec) -> pa.Array:
    """Returns a row of zeros of a column, with which a rank without rows joins collectives."""
    kind = kind_of(spec)
    if spec.as_it_is:
        return pa.array([empty_value(kind.arrow(spec))], kind.arrow(spec))
    column = kind.of_values(kind.zeros(spec)[:1], spec, spec.column, nulls=False)
    return packed([column] * len(spec.sources), spec) if spec.sources else column
