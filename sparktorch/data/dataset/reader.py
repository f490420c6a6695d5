"""Reads the record batches of a partition into the shard of a rank, and checks every row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from sparktorch.base.no_op import no_op
from sparktorch.data.columns import GROUP, KEY, ORDER, VALIDATION, Columns, TensorSpec, carried_name
from sparktorch.data.convert.checks import RowFilter, check_labels, check_weights
from sparktorch.data.convert.sql_types import empty_value
from sparktorch.data.convert.tensors import pack
from sparktorch.data.dataset.base import Folds, Shard
from sparktorch.data.dataset.rows import Rows, SampledRows
from sparktorch.data.dataset.shards import InMemoryShard, OutOfCoreShard
from sparktorch.data.fields.base import Dense, Field
from sparktorch.data.fields.kinds import kind_of
from sparktorch.data.sampling.groups import GroupKeys
from sparktorch.data.sampling.row_keys import RowDigests, RowKeys
from sparktorch.data.storage import RowStorage
from sparktorch.errors import ColumnError

__all__ = ["balanced_weights", "read_shard"]


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
            that arrive in the order of their positions, validation rows last, are read in runs. Other rows are read one
            by one, and take 4 bytes of memory each.
        by_length: Whether the rows of a step are sorted by the length of the first ragged input.
        moved: It is called when there is progress, in addition to each batch that is taken from `batches`.
    """
    storage = storage or RowStorage()
    fields = {spec.name: _field(spec, columns, storage) for spec in columns.tensors}
    try:
        row_keys = RowKeys(storage, by_key=by_key) if columns.groups is None else GroupKeys(storage, columns)
        folds = Folds([carried_name(index) for index in range(len(columns.carried))]) if columns.folds else None
        dropped = _read(batches, columns, fields, row_keys, folds)
        size = sum(field.nbytes for field in fields.values())
        if not row_keys.count:
            # The placeholder may have the label that the loss leaves out.
            without_ignored = replace(columns, ignored=None)
            fields = {spec.name: _field(spec, without_ignored, storage) for spec in columns.tensors}
            for spec in columns.tensors:
                fields[spec.name].append(_zeros(spec) if placeholder is None else placeholder.column(spec.name))
        count = max(1, row_keys.count)
        if isinstance(row_keys, GroupKeys):
            samples = row_keys.samples(moved)
            stored: Rows = SampledRows(fields, columns, storage, samples=samples, count=count, size=size)
        else:
            stored = Rows(fields, columns, storage, by_length=by_length, count=count, size=size)
        shard_class = OutOfCoreShard if storage.on_disk else InMemoryShard
        return shard_class(stored, row_keys, dropped=dropped, budget=budget, folds=folds)
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
    row_filter = RowFilter(columns)
    first_row = 0
    for batch in batches:
        rows = row_filter.rows_of(batch, first_row=first_row)
        digests = _digests(rows, columns)
        try:
            for spec in columns.tensors:
                spec_digests = digests if kind_of(spec).digestible(spec) else None
                fields[spec.name].append(rows.column(spec.name), first_row=first_row, digests=spec_digests)
        except ColumnError as error:
            raise row_filter.renumber(error, first_row=first_row) from None
        if columns.validation:
            # The row filter has removed the rows with a null in this column.
            held_out = rows.column(VALIDATION).to_numpy(zero_copy_only=False)
        else:
            held_out = np.zeros(rows.num_rows, np.bool_)
        keys = rows.column(KEY).to_numpy() if digests is None else digests.finish()
        row_keys.append(keys, held_out)
        if isinstance(row_keys, GroupKeys):
            # Without an order, rows of a group follow their keys: any order does, if it is the same in each run.
            has_order = ORDER in rows.schema.names
            order = rows.column(ORDER).to_numpy() if has_order else keys
            row_keys.append_to_groups(rows.column(GROUP).to_numpy(), order)
            if has_order and row_filter.last_mask is not None:
                dropped_rows = batch.select([GROUP, ORDER]).filter(pa.array(row_filter.last_mask)).drop_null()
                row_keys.append_dropped(dropped_rows.column(GROUP).to_numpy(), dropped_rows.column(ORDER).to_numpy())
        if folds is not None:
            folds.append(rows, keys, held_out)
        first_row += batch.num_rows
    row_filter.raise_for_unfit_rows()
    return row_filter.dropped


def _digests(rows: pa.RecordBatch, columns: Columns) -> RowDigests | None:
    """Returns the row digests of a batch, to which its columns are added; `None` if its keys cover all columns."""
    if columns.keyed:
        return None
    keys = rows.column(KEY).to_numpy() if KEY in rows.schema.names else np.zeros(rows.num_rows, np.int64)
    return RowDigests(keys.view(np.uint64))


def balanced_weights(sums: Sequence[float]) -> list[float]:
    """Returns the class weights that balance the classes: `rows / (classes * rows of the class)`.

    `sums` has for each class the number of its rows, or the sum of their weights. Classes without rows are not counted,
    and have the weight 1, which is the mean over all rows.
    """
    classes = sum(1 for count in sums if count)
    return [sum(sums) / (classes * count) if count else 1.0 for count in sums]


def _field(spec: TensorSpec, columns: Columns, storage: RowStorage) -> Field:
    """Returns an empty field for a column; label and weight fields check their values."""
    if spec is columns.label:
        check = partial(check_labels, columns=columns)
        return Dense(spec, storage, check, dtype=None if columns.classes is None else np.int64)
    if spec is columns.weight:
        return Dense(spec, storage, partial(check_weights, spec=spec))
    return kind_of(spec).field(spec, storage)


def _zeros(spec: TensorSpec) -> pa.Array:
    """Returns one row of zeros for a column, with which a rank without rows joins collectives."""
    kind = kind_of(spec)
    if spec.as_it_is:
        return pa.array([empty_value(kind.arrow(spec))], kind.arrow(spec))
    column = kind.of_values(kind.zeros(spec)[:1], spec, spec.column, nulls=False)
    return pack([column] * len(spec.sources), spec) if spec.sources else column
