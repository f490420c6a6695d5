"""Scores one row in this process, without a Spark job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
from pyspark.ml.linalg import SparseVector, Vector
from pyspark.sql import Row

from sparktorch.data.columns import TensorSpec, name_parts
from sparktorch.data.fields.kinds import kind_of
from sparktorch.errors import ColumnError, nearest
from sparktorch.model.scorer import Scorer, Scoring
from sparktorch.model.trained_module import TrainedModule

__all__ = ["columns_of", "score_row"]

# Each model has its scorer here, beside the settings that the scorer was made with. The scorer is no attribute of the
# model, because functions of users may pickle the model.
_scorers: WeakKeyDictionary[Any, tuple[Scoring, Scorer]] = WeakKeyDictionary()


def score_row(
    model: Any, trained: TrainedModule, inputs: Sequence[TensorSpec], scoring: Scoring, row: Any, names: Sequence[str]
) -> list[Any]:
    """Scores one row: the value of the only input column, or a `Row` or mapping with the input columns.

    Returns, for each of `names` as in `Scorer.score`, a number or (nested) lists of numbers; `None` for a row that
    `scoring.invalid` keeps or skips. The scorer is cached as long as the model lives. Device "auto" means the CPU here.
    """
    columns = columns_of(row, inputs)
    cached = _scorers.get(model)
    if cached is None or cached[0] != scoring:
        device = "cpu" if scoring.device == "auto" else scoring.device
        # The module is not compiled: that would take longer than to score single rows.
        scorer = Scorer(trained, replace(scoring, compiled=False), device=device)
        cached = (scoring, scorer)
        _scorers[model] = cached
    _, scorer = cached
    return [column[0].as_py() for column in scorer.score_arrow(columns, names)]


def columns_of(row: Any, specs: Sequence[TensorSpec]) -> list[pa.Array]:
    """Returns a row as Arrow arrays of length one, as Spark would send them."""
    single = specs[0] if len(specs) == 1 else None
    value = row.asDict() if isinstance(row, Row) else row
    if single is not None and (not isinstance(value, Mapping) or _is_struct(value, single)):
        return [_column(value, single, single.column)]
    names = [name for spec in specs for name in spec.sources or (spec.column,)]
    if not isinstance(value, Mapping):
        raise ColumnError(
            f"the model takes several columns, {', '.join(names)}, and got one value", hint="pass a Row or a dict"
        )
    return [_column(_named(value, name), spec, name) for spec in specs for name in spec.sources or (spec.column,)]


def _is_struct(mapping: Mapping[Any, Any], spec: TensorSpec) -> bool:
    """Whether a mapping is the value of a column of structs, and not a row with such a column."""
    candidates = [_key(mapping, name) for name in (spec.column, name_parts(spec.column)[0])]
    keys = [key for key in candidates if key is not None]
    if any(mapping[key] is None or isinstance(mapping[key], Mapping | Row) for key in keys):
        return False
    # A struct may have a field with the column's name. Then the name must be among the parts of a struct that the
    # column's kind takes.
    return any(set(keys) <= set(parts) <= mapping.keys() for parts in kind_of(spec).parts(spec))


def _named(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value under a column name, or under a path into structs and arrays of structs, as Spark reads it."""

    def field(value: Any, part: str) -> Any:
        if value is None:  # The fields of a null struct are null.
            return None
        fields = value.asDict() if isinstance(value, Row) else value
        if isinstance(fields, list):
            return [field(element, part) for element in fields]
        key = _key(fields, part) if isinstance(fields, Mapping) else None
        if key is None:
            raise ColumnError(
                f"the row has no column {name!r}",
                hint=nearest(name, map(str, row)),
                column=name,
                code="ST-COLUMN-MISSING",
            )
        return fields[key]

    return reduce(field, [name] if _key(row, name) is not None else name_parts(name), row)


def _key(fields: Mapping[str, Any], name: str) -> str | None:
    """Returns the key with this name, or else a key that differs only in case; `None` if there is neither."""
    if name in fields:
        return name
    return next((key for key in fields if str(key).lower() == name.lower()), None)


def _column(value: Any, spec: TensorSpec, name: str) -> pa.Array:
    """Returns a value as an Arrow array of length one."""
    if isinstance(value, Vector):
        if not kind_of(spec).numeric:
            raise ColumnError(
                f"the value for column {name!r} is a vector", hint=f"the model takes {spec.describe()}", column=name
            )
        value = _parts(value)
    if isinstance(value, Row):
        value = value.asDict(recursive=True)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    try:
        return kind_of(spec).of_value(value, spec)
    except (pa.ArrowException, OverflowError) as error:
        raise ColumnError(
            f"the value for column {name!r} does not fit: {error}",
            hint=f"the model takes {spec.describe()}, of one row; for several there is transform",
            column=name,
            code="ST-COLUMN-TYPE",
        ) from error


def _parts(vector: Any) -> dict[str, Any]:
    """Returns an ML vector as the struct that Spark stores; a dense one has no size and no indices."""
    values = vector.values.tolist()
    if isinstance(vector, SparseVector):
        return {"size": len(vector), "indices": vector.indices.tolist(), "values": values}
    return {"size": None, "indices": [], "values": values}
