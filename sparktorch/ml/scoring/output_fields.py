"""The fields of a model's scores, and the output columns that have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparktorch.errors import ConfigError
from sparktorch.spark.column_names import ColumnNames

__all__ = ["check_apart", "layer_field", "output_fields", "sql_type"]


def output_fields(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns the field of each output column, from pairs of column and field; leaves out columns with an empty name.

    Raises:
        ConfigError: Two columns have the same name.
    """
    named = [(name, field) for name, field in pairs if name]
    check_apart([name for name, _ in named])
    return dict(named)


def check_apart(names: Sequence[str], columns: ColumnNames | None = None) -> None:
    """Refuses two output columns with the same name, or with names that Spark takes as one by `columns`."""
    twice = next(((name, name) for name in names if names.count(name) > 1), None)
    if twice is None and columns is not None:
        twice = columns.alike(names)
    if twice is not None:
        raise ConfigError(
            f"two output columns are called {twice[0]!r} and {twice[1]!r}, which to Spark is one name",
            hint="give each a name of its own, or leave one out with ''",
            code="ST-COLUMN-TAKEN",
        )


def layer_field(index: int) -> str:
    """Returns the name of the field that has the output of a layer; `index` is the layer's index in `outputLayers`."""
    return f"layer:{index}"


def sql_type(shape: tuple[int, ...]) -> str:
    """Returns the SQL type of an output whose rows have this shape."""
    return "array<" * len(shape) + "float" + ">" * len(shape)
