"""Configuration checks itself, and says which key to change."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from sparktorch.base.config import TrainConfig, above, at_least, from_dict, one_of, to_dict
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


@pytest.mark.parametrize(
    ("values", "message", "param"),
    [
        ({"batch_size": 0}, "batchSize must be at least 1, got 0", "batchSize"),
        ({"batch_size": -3}, "batchSize must be at least 1, got -3", "batchSize"),
        ({"epochs": 0}, "epochs must be at least 1, got 0", "epochs"),
        ({"task": "clasification"}, "task 'clasification' is unknown", "task"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_users_name(values: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**values)
    assert caught.value.what == message
    assert caught.value.where == {"param": param}


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 0])
def test_bounds_refuse_what_is_not_finite_or_too_small(number: float) -> None:
    with pytest.raises(ConfigError, match="x must be at least 1"):
        at_least("x", number, 1)
    with pytest.raises(ConfigError, match="x must be above 0"):
        above("x", number, 0)


def test_bounds_let_pass_what_is_within() -> None:
    at_least("x", 1, 1)
    above("x", 1e-12, 0)
    one_of("x", "cpu", ("cpu", "cuda"))


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        one_of("device", "cuds", ("cpu", "cuda"))
    assert caught.value.hint.startswith("did you mean 'cuda'?")


def test_a_configuration_survives_the_way_to_json_and_back() -> None:
    config = TrainConfig(task="regression", batch_size=7, epochs=3, seed=-1, shuffle=False)
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    "values",
    [
        {"name": "a"},
        {"name": "a", "size": 3, "share": 1, "label": None, "flag": True, "options": {"x": 1}, "parts": [1]},
        {"name": "a", "parts": None, "label": "b"},
    ],
)
def test_values_of_the_right_type_make_a_section(values: dict[str, Any]) -> None:
    assert {**to_dict(Section(name="a")), **values} == to_dict(from_dict(Section, values))


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"name": "a", "sise": 3}, "unknown key data.sise", "did you mean 'size'?"),
        ({"name": "a", "SIZE": 3}, "unknown key data.SIZE", "did you mean 'size'?"),
        (
            {"name": "a", "zzz": 3},
            "unknown key data.zzz",
            "valid names: flag, label, name, options, parts, share, size",
        ),
        ({}, "missing key data.name", ""),
        ({"name": 3}, "data.name must be str, got 3 (int)", ""),
        ({"name": None}, "data.name must be str, got None (NoneType)", ""),
        ({"name": "a", "size": 1.0}, "data.size must be int, got 1.0 (float)", ""),
        ({"name": "a", "size": True}, "data.size must be int, got True (bool)", ""),
        ({"name": "a", "size": None}, "data.size must be int, got None (NoneType)", ""),
        ({"name": "a", "share": "0.5"}, "data.share must be float, got '0.5' (str)", ""),
        ({"name": "a", "share": False}, "data.share must be float, got False (bool)", ""),
        ({"name": "a", "label": 1}, "data.label must be str | None, got 1 (int)", ""),
        ({"name": "a", "flag": "yes"}, "data.flag must be bool, got 'yes' (str)", ""),
        ({"name": "a", "flag": 1}, "data.flag must be bool, got 1 (int)", ""),
        ({"name": "a", "options": [1]}, "data.options must be dict[str, Any], got [1] (list)", ""),
        ({"name": "a", "parts": {}}, "data.parts must be list[int] | None, got {} (dict)", ""),
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


def test_at_the_top_level_the_section_is_called_so() -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(Section, {"nam": "a"})
    assert str(caught.value).startswith("unknown key nam [section=top level]\n  -> did you mean 'name'?")
