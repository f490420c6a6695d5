"""Values as JSON that gives them back, tuples too."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

__all__ = ["is_json", "tuples_made", "tuples_marked"]


def is_json(value: Any) -> bool:
    """Whether JSON gives the very value back: of tuples it makes lists, and NaN equals nothing."""
    try:
        return repr(json.loads(json.dumps(value))) == repr(value)
    except (TypeError, ValueError):
        return False


def tuples_marked(value: Any) -> Any:
    """Returns a value with `{"$tuple": [...]}` for the tuples in it, and Python's numbers for NumPy's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: tuples_marked(item) for key, item in value.items()}
    if type(value) is list:
        return [tuples_marked(item) for item in value]
    return {"$tuple": [tuples_marked(item) for item in value]} if type(value) is tuple else value


def tuples_made(value: Any) -> Any:
    """Returns what was given to `tuples_marked`."""
    if isinstance(value, list):
        return [tuples_made(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$tuple"}:
        return tuple(tuples_made(item) for item in value["$tuple"])
    return {key: tuples_made(item) for key, item in value.items()}
