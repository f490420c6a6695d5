"""Values as JSON from which they come back unchanged, tuples included."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

__all__ = ["is_json", "tuples_made", "tuples_marked"]


def is_json(value: Any) -> bool:
    """Whether a value comes back from JSON unchanged; tuples do not, because they come back as lists."""
    try:
        # Texts are compared, because NaN does not equal itself.
        return repr(json.loads(json.dumps(value))) == repr(value)
    except (TypeError, ValueError):
        return False


def tuples_marked(value: Any) -> Any:
    """Returns a value with `{"$tuple": [...]}` in place of tuples, and Python's numbers in place of NumPy's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: tuples_marked(item) for key, item in value.items()}
    if type(value) is list:
        return [tuples_marked(item) for item in value]
    return {"$tuple": [tuples_marked(item) for item in value]} if type(value) is tuple else value


def tuples_made(value: Any) -> Any:
    """Returns the value that `tuples_marked` was called with."""
    if isinstance(value, list):
        return [tuples_made(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$tuple"}:
        return tuple(tuples_made(item) for item in value["$tuple"])
    return {key: tuples_made(item) for key, item in value.items()}
