"""Columns of any type, kept and handed over as they are, and the callable that makes tensors of them."""

from __future__ import annotations

import datetime as dt
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparktorch.data.columns import KEY, VALIDATION, Columns, TensorSpec
from sparktorch.data.dataset.reader import read_shard
from sparktorch.data.fields.arrow import ArrowColumn
from sparktorch.data.preprocess import Preprocess, StepContext, check_signature
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.data.storage import RowStorage, Runs
from sparktorch.errors import ColumnError, ConfigError, ModuleError, PersistenceError
from sparktorch.model.scorer import Scorer
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.recipe.dry_run import ArgumentSpec
from tests.support.models import trained_module
from tests.support.text import Bag, lengths, noisy

TEXT = TensorSpec(name="x0", column="text", dtype="float32", kind="any", sql="string")

text = st.text(max_size=4)
KINDS: dict[str, tuple[pa.DataType, Any]] = {
    "string": (pa.string(), text),
    "binary": (pa.binary(), st.binary(max_size=4)),
    "boolean": (pa.bool_(), st.booleans()),
    "smallint": (pa.int16(), st.integers(-99, 99)),
    "double": (pa.float64(), st.integers(-99, 99).map(float)),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(dt.timezone.utc))),
    "large string": (pa.large_string(), text),
    "large lists": (pa.large_list(pa.large_binary()), st.lists(st.binary(max_size=4), max_size=3)),
    "array<string>": (pa.list_(pa.string()), st.lists(text, max_size=3)),
    "array<array<int>>": (pa.list_(pa.list_(pa.int32())), st.lists(st.lists(st.integers(0, 9), max_size=3))),
    "struct": (
        pa.struct({"a": pa.string(), "b": pa.list_(pa.float32())}),
        st.fixed_dictionaries({"a": st.none() | text, "b": st.none() | st.lists(st.none() | st.just(1.5), max_size=2)}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_columns_of_any_type_come_back_as_they_are(kind: str, data: st.DataObject) -> None:
    arrow, values = KINDS[kind]
    rows = data.draw(st.lists(values, min_size=1, max_size=8))
    index = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)), np.int64)
    column = pa.array(rows, arrow)
    memory = ArrowColumn(TEXT, RowStorage())
    storage = RowStorage(tempfile.gettempdir(), budget=0)
    disk = ArrowColumn(TEXT, storage)
    for field in (memory, disk):
        field.append(pa.concat_arrays([column, column]).slice(len(rows)))
        field.append(column)
    memory.finish()
    expected = [rows[i] for i in index]
    (found,) = memory.take(torch.from_numpy(index + len(rows)))
    plain = kind in ("boolean", "smallint", "double", "date", "timestamp")
    assert isinstance(found, np.ndarray) == plain
    back = pa.array(found, arrow) if plain else found
    assert back.to_pylist() == expected
    (again,) = disk.read(Runs.of(index)).take(torch.arange(len(index)))
    storage.close()
    assert pa.array(again, arrow).to_pylist() == expected if plain else again.equals(back)


@pytest.mark.slow
def test_more_than_two_gib_of_text_are_taken_as_large_text() -> None:
    field = ArrowColumn(TEXT, RowStorage())
    field.append(pa.array(["a" * (1 << 26), "b"]))
    field.finish()
    (found,) = field.take(torch.tensor([0] * 33 + [1]))
    assert found.type == pa.large_string()
    assert found[33].as_py() == "b"
    assert found.nbytes > 33 << 26
    (found,) = field.take(torch.tensor([1, 1]))
    assert (found.type, found.to_pylist()) == (pa.string(), ["b", "b"])


def test_numbers_are_filled_and_text_is_left_to_the_callable() -> None:
    def column(kind: pa.DataType, *rows: Any) -> Any:
        field = ArrowColumn(TensorSpec(name="x", column="c", dtype="float32", kind="any", fill=3), RowStorage())
        field.append(pa.array(rows, kind))
        field.finish()
        return field.part(0, len(rows))[0]

    assert column(pa.float32(), 1, None, float("nan")).tolist() == [1, 3, 3]
    assert column(pa.int8(), 1, None).tolist() == [1, 3]
    assert column(pa.string(), "a", None).to_pylist() == ["a", None]
    for rows in ([True, False], [None, False]):
        assert column(pa.bool_(), *rows).tolist() == [True, False]
    day = dt.date(2026, 1, 2)
    for rows in ([day, day], [day, None], [None, None]):
        found = column(pa.date32(), *rows)
        assert found.dtype == np.dtype("datetime64[D]")
        assert found.tolist() == rows
    assert np.isnat(column(pa.timestamp("us", "UTC"), None, dt.datetime(2026, 1, 2))).tolist() == [True, False]


def returns(value: Any) -> Any:
    def function(columns: Any, *, epoch: int | None, generator: torch.Generator) -> Any:
        return value

    return function


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2), "returned Tensor"),
        ({"a": [1, 2]}, "returned list as 'a'"),
        ({"a": torch.ones(2), "b": torch.ones(3, 2)}, r"returned 'b' of shape \(3, 2\) for 2 rows"),
    ],
)
def test_what_is_no_dict_of_tensors_with_a_row_for_each_row_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ModuleError, match=message):
        Preprocess(returns(value), ["text"])([(pa.array(["a", "b"]),)], 2)


def test_tensors_come_in_the_order_of_the_first_row_whichever_way_they_are_returned() -> None:
    def swapping(columns: Any, *, epoch: int | None, generator: torch.Generator) -> Any:
        pair = {"a": torch.zeros(1), "b": torch.ones(1)}
        return pair if epoch is None else dict(reversed(pair.items()))

    column = [(pa.array(["a"]),)]
    preprocess = Preprocess(swapping, ["text"])
    preprocess = replace(preprocess, arguments=tuple(preprocess(column, 1)))
    assert list(preprocess(column, 1, StepContext(0, 1))) == ["a", "b"]
    with pytest.raises(ModuleError, match="returned 'a' and 'b', and 'a' for the first row"):
        replace(preprocess, arguments=("a",))(column, 1)


@pytest.mark.parametrize("wrong", [len, 7, lambda columns, epoch: 1])
def test_a_callable_must_take_the_epoch_and_a_generator(wrong: Any) -> None:
    check_signature(lengths)
    with pytest.raises(ConfigError, match="does not take the epoch and a generator"):
        check_signature(wrong)


def taken(function: Any, *, epoch: int | None = 0, seed: int = 1, disk: bool = False) -> list[torch.Tensor]:
    """Returns what the callable makes of 20 rows in steps of 6, or, without an epoch, of as many validation rows."""
    words = pa.array(["w" * (i % 5) for i in range(20)])
    rows = {"x0": words, KEY: pa.array(np.arange(20) << 40), VALIDATION: pa.array([epoch is None] * 20)}
    columns = Columns(inputs=(TEXT,), preprocess=Preprocess(function, ["text"]), validation="v")
    storage = RowStorage(tempfile.gettempdir(), budget=0) if disk else RowStorage()
    shard = read_shard([pa.RecordBatch.from_pydict(rows)], columns, storage=storage)
    if epoch is not None:
        shard.schedule(0, SamplingPlan(rows=20, batch_size=6, seed=seed, shuffle=False))
    batches = shard.validation(6) if epoch is None else shard.epoch(epoch)
    found = [batch.inputs[0] for batch in batches]
    shard.close()
    return found


@pytest.mark.parametrize(("epoch", "told"), [(3, 3.0), (None, -1.0)])
def test_rows_pass_through_the_callable_with_their_epoch(epoch: int | None, told: float) -> None:
    expected = torch.tensor([[float(i % 5), told] for i in range(20)])
    assert torch.equal(torch.cat(taken(lengths, epoch=epoch)), expected)


def test_what_is_random_depends_on_seed_epoch_and_step_and_on_nothing_else() -> None:
    first = taken(noisy)
    assert all(torch.equal(a, b) for a, b in zip(first, taken(noisy, disk=True), strict=True))
    for other in (taken(noisy, epoch=1), taken(noisy, seed=2), first[1:] + first[:1]):
        assert not torch.equal(first[0], other[0])


def trained(function: Any) -> TrainedModule:
    arguments = (ArgumentSpec("preprocess, 'x'", "float32", (2,)),)
    more = {"task": "regression", "preprocess": function, "arguments": arguments}
    return trained_module(Bag, torch.zeros(2, 2), inputs=[TEXT], **more)


def test_a_model_is_saved_with_its_callable_and_scores_text(tmp_path: Path) -> None:
    model = replace(trained(lengths), returned=("x",))
    model.save(tmp_path)
    loaded = TrainedModule.load(tmp_path)
    assert (loaded.preprocess, loaded.arguments, loaded.inputs) == (lengths, model.arguments, model.inputs)
    assert loaded.returned == ("x",)
    scored = Scorer(loaded).score([pa.array(["a", "bcd", ""])])
    assert scored["prediction"].tolist() == [0.0, 2.0, -1.0]  # of length and epoch: none
    with pytest.raises(ColumnError, match="column 'text' has 1 row with null values"):
        Scorer(loaded).score([pa.array(["a", None])])


def test_a_callable_without_import_path_is_pickled_on_request_alone(tmp_path: Path) -> None:
    model = trained(returns({"x": torch.ones(1, 2)}))
    with pytest.raises(PersistenceError, match=r"preprocess .*function has no import path"):
        model.save(tmp_path)
    model.save(tmp_path, allow_pickle=True)
    with pytest.raises(PersistenceError, match="preprocess was pickled"):
        TrainedModule.load(tmp_path)
    loaded = TrainedModule.load(tmp_path, allow_pickle=True)
    assert Scorer(loaded).score([pa.array(["a"])])["prediction"].tolist() == [2.0]
