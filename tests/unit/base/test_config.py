"""Configuration checks itself, and says which key to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from sparktorch.base.config import above, at_least, from_dict
from sparktorch.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Section:
    name: str
    size: int = 1
    share: float = 0.5
    label: str | None = None
    flag: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    parts: list[int] | None = None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0])
def test_bounds_refuse_what_is_not_finite_or_too_small(number: float) -> None:
    with pytest.raises(ConfigError, match="x must be at least 1"):
        at_least("x", number, 1)
    with pytest.raises(ConfigError, match="x must be above 0"):
        above("x", number, 0)


def test_values_of_the_right_type_make_a_section() -> None:
    every = {"name": "a", "size": 3, "share": 1, "label": None, "flag": True, "options": {"x": 1}, "parts": [1]}
    for values in ({"name": "a"}, every, {"name": "a", "parts": None, "label": "b"}):
        assert {**asdict(Section(name="a")), **values} == asdict(from_dict(Section, values))


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"name": "a", "sise": 3}, "unknown key data.sise", "did you mean 'size'?"),
        ({}, "missing key data.name", ""),
        ({"name": "a", "size": True}, "data.size must be int, got True (bool)", ""),
        ({"name": "a", "label": 1}, "data.label must be str | None, got 1 (int)", ""),
        ({"name": "a", "parts": [1, "2"]}, "data.parts[1] must be int, got '2' (str)", ""),
        ({"name": "a", "options": {1: 2}}, "data.options.keys() must be str, got 1 (int)", ""),
        ({"name": int}, "data.name must be str, got <class 'int'> (type)", "give its name, 'int'"),
    ],
)
def test_a_wrong_key_is_refused_with_its_section(values: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(Section, values, where="data")
    assert caught.value.what == message
    assert caught.value.hint.startswith(hint)


def test_bounds_refuse_text_in_place_of_a_number() -> None:
    with pytest.raises(ConfigError, match="memory must be a number above 0, got 8GB"):
        above("memory", "8GB", 0)  # type: ignore[arg-type]
