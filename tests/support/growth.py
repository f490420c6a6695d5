"""A program: reads a shard, and prints the most by which the process has grown meanwhile, as a multiple of the rows."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparktorch.data.columns import KEY, LABEL, Columns, TensorSpec, input_name
from sparktorch.data.dataset.reader import read_shard
from tests.support.frames import record_batches

ROWS, WIDTH, TIMES = 10_000, 100, 75


def arriving(batch: pa.RecordBatch, times: int) -> Iterator[pa.RecordBatch]:
    """Yields a batch again and again, each time in memory of its own, as Spark sends it."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    for _ in range(times):
        yield from pa.ipc.open_stream(io.BytesIO(sink.getvalue()))


def resident() -> int:
    """Returns the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    """Reads once to have all code loaded, and once to look."""
    features = np.ones((ROWS, WIDTH), np.float32)
    (batch,) = record_batches({input_name(0): features, LABEL: features[:, 0], KEY: np.arange(ROWS)}, size=ROWS)
    columns = Columns(
        inputs=(TensorSpec(name=input_name(0), column="features", dtype="float32", shape=(WIDTH,)),),
        label=TensorSpec(name=LABEL, column="target", dtype="float32"),
    )
    read_shard(arriving(batch, 2), columns)
    over, seen, before = threading.Event(), [0], resident()

    def look() -> None:
        while not over.wait(0.002):
            seen.append(resident())

    thread = threading.Thread(target=look)
    thread.start()
    shard = read_shard(arriving(batch, TIMES), columns)
    over.set()
    thread.join()
    print((max(seen) - before) / shard.bytes)


if __name__ == "__main__":
    main()
