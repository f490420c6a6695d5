"""What a rank makes of the stream in which Spark's JVM sends its rows."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql.pandas.serializers import ArrowStreamSerializer

from sparktorch.spark.launch.rank_task import StreamBrokenError, unbroken


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
