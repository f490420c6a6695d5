"""Parts of the Spark side that are arithmetic on strings and bytes, and the scorers that a process keeps."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.sql import Row
from pyspark.sql.pandas.serializers import ArrowStreamSerializer
from torch import nn

from sparktorch.distributed.addresses import address_towards, host_of
from sparktorch.errors import ClusterError, ColumnError, failure_in, failure_text
from sparktorch.model.scorer import Scoring
from sparktorch.spark import scoring_udf
from sparktorch.spark.launch.gpus import choose_device, device_index
from sparktorch.spark.launch.rank_task import RESULT_SCHEMA, StreamBrokenError, _chunks, assemble, unbroken
from sparktorch.worker import RankResult
from tests.unit.model.test_trained_module import trained


@pytest.mark.parametrize(
    ("address", "visible", "index"),
    [("3", None, 3), ("3", "", 3), ("7", "2, 5, 7", 2), ("GPU-8f3e", "GPU-1a2b,GPU-8f3e", 1)],
)
def test_a_gpu_address_becomes_the_index_that_cuda_counts(address: str, visible: str | None, index: int) -> None:
    assert device_index(address, visible) == index


@pytest.mark.parametrize(("address", "visible"), [("GPU-8f3e", None), ("1", "0,2"), ("1", "GPU-1a2b")])
def test_a_gpu_that_cuda_does_not_see_is_refused(address: str, visible: str | None) -> None:
    with pytest.raises(ClusterError, match=f"GPU {address}, which CUDA_VISIBLE_DEVICES={visible or ''} hides"):
        device_index(address, visible)


def test_a_rank_trains_on_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    beyond = torch.cuda.device_count()
    assert choose_device("cpu", ["0"], local_rank=0, local_size=1) == "cpu"
    assert choose_device("auto", [], local_rank=0, local_size=beyond + 1) == "cpu"
    with pytest.raises(ClusterError, match=f"was to use cuda device {beyond}, but torch sees {beyond}"):
        choose_device("cuda", [str(beyond)], local_rank=0, local_size=1)


@pytest.mark.parametrize(
    ("address", "host"),
    [("worker-3", "worker-3"), ("10.0.0.7:41233", "10.0.0.7"), ("[fe80::1]:41233", "fe80::1"), ("[::1]", "::1")],
)
def test_the_host_of_an_address_is_found(address: str, host: str) -> None:
    assert host_of(address) == host


def test_the_local_address_towards_a_host_is_known_where_there_is_one() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("::1") == ""


@pytest.mark.parametrize("megabytes", [0, 40])
def test_a_result_of_any_size_survives_its_way_in_chunks(megabytes: int) -> None:
    payload = np.random.default_rng(0).bytes(megabytes << 20)
    results = [RankResult({"rows": rank, "history": [{"loss": 0.5}]}, b"" if rank else payload) for rank in range(3)]
    chunks = [list(_chunks(rank, result)) for rank, result in enumerate(results)]
    assert max(batch.nbytes for batches in chunks for batch in batches) < 17 << 20
    table = pa.Table.from_batches([batch for batches in (chunks[2], chunks[0], chunks[1]) for batch in batches])
    assert [f"{field.name} {field.type}" for field in table.schema] == ["rank int32", "meta string", "payload binary"]
    assert RESULT_SCHEMA == "rank int, meta string, payload binary"
    assert assemble([Row(*row.values()) for row in table.to_pylist()], 3) == [
        (result.meta, result.payload) for result in results
    ]


def test_a_result_that_comes_in_part_is_an_error() -> None:
    chunks = [batch.to_pylist()[0] for batch in _chunks(0, RankResult({"rows": 1}, b"x" * (40 << 20)))]
    for rows in (chunks[:-1], chunks[1:], []):
        with pytest.raises(ClusterError, match="bytes that the rank returned have come") as caught:
            assemble([Row(*row.values()) for row in rows], 1)
        assert "spark.driver.memory" in str(caught.value.hint)


@pytest.mark.parametrize("around", ["\n\n\tat org.apache.spark.Worker", " {", "\nsparktorch-failure:{cut off"])
def test_a_failure_is_found_in_the_message_of_a_spark_job(around: str) -> None:
    failure = ColumnError('a { in it, and "}"', hint="drop\nthem", column="x", rank=1)
    for message in (f"Job {{1}} aborted: {failure_text(failure)}{around}", f"{around} {failure_text(failure)} }}"):
        found = failure_in(message)
        assert type(found) is ColumnError
        assert found.to_dict() == failure.to_dict()
    assert failure_in("Job aborted due to stage failure: {}") is None


def streamed(*, upto: float) -> list[int]:
    """The numbers of a stream of two batches, read as pyspark reads it, of which so large a share has come."""
    sink, batch = io.BytesIO(), pa.record_batch([pa.array(range(1000))], names=["x"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    whole = sink.getvalue()
    stream = pa.BufferReader(whole[: int(upto * len(whole))])
    return [
        number for part in unbroken(ArrowStreamSerializer().load_stream(stream)) for number in part["x"].to_pylist()
    ]


def test_a_whole_stream_arrives_as_it_was_sent() -> None:
    assert streamed(upto=1) == [*range(1000), *range(1000)]


def test_a_rank_without_memory_for_its_rows_has_failed_itself() -> None:
    def full() -> Iterator[pa.RecordBatch]:
        raise pa.ArrowMemoryError("malloc of size 8388608 failed")
        yield

    with pytest.raises(pa.ArrowMemoryError):
        list(unbroken(full()))


@pytest.mark.parametrize("upto", [0, 0.005, 0.4, 0.8])
def test_a_stream_that_breaks_off_is_told_from_what_fails_in_the_rank(upto: float) -> None:
    with pytest.raises(StreamBrokenError):
        streamed(upto=upto)


class Cyclic(nn.Linear):
    """Refers to itself, and is told of."""

    alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__(5, 1)
        self.itself = [self]
        self.alive.add(self)


def test_scorers_that_leave_the_cache_are_freed_also_where_modules_are_in_cycles() -> None:
    try:
        model = trained(Cyclic)
        for key in range(8):
            sent: Any = SimpleNamespace(key=str(key), load=lambda: model)
            scoring_udf.scorer_here(sent, Scoring(device="cpu"), local=True)
        assert len(scoring_udf._scorers) == scoring_udf._KEPT_SCORERS
        assert len(Cyclic.alive) <= scoring_udf._KEPT_SCORERS + 1  # and the one that was trained
    finally:
        scoring_udf._scorers.clear()
        gc.unfreeze()


def test_what_the_first_task_of_a_scorer_has_imported_is_not_looked_at_after_every_later_task() -> None:
    model, left = trained(nn.Linear, params={"in_features": 5, "out_features": 1}), []
    sent: Any = SimpleNamespace(key="one", load=lambda: model)
    try:
        for _ in range(3):
            scoring_udf.scorer_here(sent, Scoring(device="cpu"), local=True)
            left.append(["an object that the collector knows"])
        known = {id(each) for each in gc.get_objects()}
        assert [id(each) in known for each in left] == [False, True, True]
    finally:
        scoring_udf._scorers.clear()
        gc.unfreeze()
