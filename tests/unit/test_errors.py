"""An error says what, where and what to do, and says the same after a journey."""

from __future__ import annotations

import json
import pickle
import traceback
from functools import partial
from typing import Any

import pytest

from sparktorch import errors
from sparktorch.base.config import TrainConfig
from sparktorch.errors import (
    ColumnError,
    ConfigError,
    ConflictError,
    ModuleError,
    RankError,
    SparkTorchError,
    nearest,
    shortened,
    shortens,
)

KINDS = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error") and name != "SparkTorchError"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickle_and_json(kind: type[SparkTorchError]) -> None:
    error = kind("it broke", hint="mend it", trace="Traceback ...", code="ST-NULL", column="age", row=7, rank=None)
    for copy in (
        pickle.loads(pickle.dumps(error)),
        SparkTorchError.from_dict(json.loads(json.dumps(error.to_dict()))),
    ):
        assert type(copy) is kind
        assert copy.to_dict() == error.to_dict()
        assert str(copy) == str(error)


def test_an_error_of_an_older_version_has_the_code_of_its_class() -> None:
    form = {name: value for name, value in ColumnError("it broke").to_dict().items() if name != "code"}
    assert SparkTorchError.from_dict(form).code == "ST-COLUMN"


def test_settings_that_exclude_each_other_are_a_conflict_and_still_a_config_error() -> None:
    with pytest.raises(
        ConfigError, match=r"are both set \[param=microBatchSize\]\n  -> set one of them \[ST-CLASH\]$"
    ) as raised:
        TrainConfig(accumulation_steps=2, micro_batch_size=4)
    assert type(raised.value) is ConflictError
    earlier = SparkTorchError.from_dict({**raised.value.to_dict(), "kind": "ConfigError"})
    assert type(earlier) is ConfigError
    assert str(earlier) == str(raised.value)


def test_a_message_says_what_where_what_to_do_and_how_it_came() -> None:
    error = RankError("it broke", hint="mend it", trace="Traceback of rank 1:\n  line\n\n", rank=1, step=None)
    assert str(error) == "it broke [rank=1]\n  -> mend it [ST-RANK-FAILED]\n\nTraceback of rank 1:\n  line"
    assert str(RankError("it broke", code="ST-CANCELLED")) == "it broke [ST-CANCELLED]"
    assert error.args == (str(error),)


def test_more_of_the_place_can_be_told_and_what_is_known_stays() -> None:
    error = ColumnError("it broke", hint="mend it", code="ST-NULL", column="age", rank=1)
    told = error.at(rank=2, host="a", epoch=None)
    assert type(told) is ColumnError
    assert told.where == {"rank": 1, "host": "a", "column": "age"}
    assert (told.hint, told.code) == ("mend it", "ST-NULL")
    assert error.where == {"column": "age", "rank": 1}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("batchsize", "did you mean 'batchSize'? valid names: batchSize, epochs"),
        ("EPOCH", "did you mean 'epochs'? valid names: batchSize, epochs"),
        ("qqq", "valid names: batchSize, epochs"),
    ],
)
def test_the_nearest_name_is_found_whatever_its_case(name: str, hint: str) -> None:
    assert nearest(name, ["epochs", "batchSize"]) == hint


OF_THE_PACKAGE = """
def fit(function):
    try:
        function()
    except Exception as error:
        raise ModuleError("it broke") from error
"""


def _broken() -> None:
    raise KeyError("of the user")


def test_rings_of_causes_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert list(errors.causes(first)) == [first, second]
    second.__cause__, second.__context__ = None, first
    assert list(errors.causes(second)) == [second]
    assert list(errors.causes(second, contexts=True)) == [second, first]


@pytest.mark.parametrize("name", ["<stdin>", "<ipython-input-1-9c>"])
def test_code_typed_into_a_console_is_the_users(name: str) -> None:
    console: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def fails():\n    raise KeyError('mine')", name, "exec"), console)
    package: dict[str, Any] = {"__name__": "sparktorch.part", "ModuleError": ModuleError}
    exec(compile(OF_THE_PACKAGE, "/site-packages/sparktorch/part.py", "exec"), package)
    with pytest.raises(ModuleError) as caught:
        package["fit"](console["fails"])
    short = shortened(caught.value)
    assert isinstance(short.__cause__, KeyError)
    assert [frame.filename for frame in traceback.extract_tb(short.__cause__.__traceback__)] == [name]


@pytest.mark.parametrize(("fails", "frames"), [(_broken, ["_broken"]), (partial(int, "x"), None)])
def test_an_error_is_shortened_to_the_users_own_frames_or_to_no_cause(fails: Any, frames: list[str] | None) -> None:
    package: dict[str, Any] = {"__name__": "sparktorch.part", "ModuleError": ModuleError}
    exec(compile(OF_THE_PACKAGE, "/site-packages/sparktorch/part.py", "exec"), package)
    with pytest.raises(ModuleError) as caught:
        package["fit"](fails)
    short = shortened(caught.value)
    assert short.__traceback__ is None
    cause = short.__cause__
    assert frames == (None if cause is None else [frame.name for frame in traceback.extract_tb(cause.__traceback__)])


def test_a_method_that_shortens_its_errors_shows_none_of_its_calls() -> None:
    @shortens
    def evaluate(column: str) -> None:
        raise ColumnError(f"there is no column {column!r}", column=column)

    with pytest.raises(ColumnError, match="no column 'a'") as caught:
        evaluate("a")
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["short"]


def test_the_traceback_of_an_interrupt_shows_none_of_our_calls_and_no_error_before_it() -> None:
    @shortens
    def fit() -> None:
        try:
            raise KeyError("while it waits")
        except KeyError:
            raise KeyboardInterrupt  # noqa: B904  # as one that comes while an error is handled

    with pytest.raises(KeyboardInterrupt) as caught:
        fit()
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["short"]
    assert caught.value.__suppress_context__
