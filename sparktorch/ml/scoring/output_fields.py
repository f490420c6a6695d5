"""The fields of a model's scores, and the output columns that have them."""

from __future__ import annotations

from collections.abc import Iterable

from sparktorch.errors import ConfigError

__all__ = ["layer_field", "output_fields", "sql_type"]


def output_fields(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns pairs of column and field as a dict, without columns that have an empty name.

    Raises:
        ConfigError: Two columns have the same name.
    """
    outputs: dict[str, str] = {}
    for name, field in pairs:
        if name in outputs:
            raise ConfigError(
                f"two output columns are called {name!r}: {outputs[name]} and {field}",
                hint="give each a name of its own, or leave one out with ''",
                code="ST-COLUMN-TAKEN",
            )
        if name:
            outputs[name] = field
    return outputs


def layer_field(place: int) -> str:
    """Returns the field of the scores that has what a layer returns, by its place in `outputLayers`."""
    return f"layer:{place}"


def sql_type(shape: tuple[int, ...]) -> str:
    """Returns the SQL type of an output of that shape of a row."""
    return "array<" * len(shape) + "float" + ">" * len(shape)
