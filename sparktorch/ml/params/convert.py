"""Converters for Params that Spark has none for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["by_column", "to_dict", "to_dicts"]


def to_dict(value: Any) -> dict[str, Any]:
    """Returns a mapping as a dict.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a dict, got {type(value).__name__}")
    return dict(value)


def to_dicts(value: Any) -> list[dict[str, Any]]:
    """Returns several mappings as a list of dicts.

    Raises:
        TypeError: They are none.
    """
    if not isinstance(value, list | tuple):
        raise TypeError(f"expected a list of dicts, got {type(value).__name__}")
    return [to_dict(item) for item in value]


def by_column(convert: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """Returns a converter of mappings from column names to such values."""

    def converter(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError(f"expected a dict by column name, got {type(value).__name__}")
        return {str(name): convert(item) for name, item in value.items()}

    return converter
