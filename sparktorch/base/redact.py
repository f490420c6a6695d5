"""Values as text for messages and logs, without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from sparktorch.errors import redacted

__all__ = ["display_text", "is_secret"]

_SECRET = re.compile(
    r"(token(_value)?|secret|passw(or)?d|pwd|(api|access|secret|private)_?key(_?id)?|credentials?|authorization)$",
    re.IGNORECASE,
)


def is_secret(value: Any, name: object = "") -> bool:
    """Whether a value is a text that messages must not show, because of its `name`, or of a password in a URL in it."""
    if not isinstance(value, str | bytes):
        return False
    return bool(_SECRET.search(str(name))) or (isinstance(value, str) and redacted(value) != value)


def display_text(value: Any, name: object = "") -> str:
    """Returns a value as text: classes and functions by name, no addresses, and `***` for secrets.

    Text counts as a secret under a `name` such as "hf_token".
    """
    if isinstance(value, str | bytes) and _SECRET.search(str(name)):
        return "'***'"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {display_text(item, key)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(display_text(item, name) for item in value)}]"
    if type(value) is tuple:
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(display_text(item, name) for item in value)}{comma})"
    if isinstance(value, partial):
        arguments = [display_text(argument) for argument in value.args]
        arguments += [f"{key}={display_text(item, key)}" for key, item in value.keywords.items()]
        return f"{display_text(value.func)}({', '.join(arguments)})"
    repr_method: object = type(value).__repr__
    if callable(value) or repr_method is object.__repr__:
        return getattr(value, "__qualname__", None) or type(value).__qualname__
    return redacted(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))
