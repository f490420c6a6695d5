"""The body of a barrier task, without Spark: it takes a rank's record batches, and returns the rank's `RankResult`.

Tests and GPU machines call `train_partition` directly.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Protocol

import pyarrow as pa
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.base.devices import is_host, let_go, select
from sparktorch.base.host_memory import forget_peaks
from sparktorch.base.world import World
from sparktorch.distributed.client import Client, Order
from sparktorch.distributed.process_group import clear_frames
from sparktorch.train.numerics.torch_errors import explained
from sparktorch.train.recipe.dry_run import DryRunResult
from sparktorch.worker.held_rows import HeldRows
from sparktorch.worker.job import RankJob, RankResult, TrainJob

__all__ = [
    "Task",
    "leaving_none_of",
    "on_rows",
    "run_held",
    "serve",
    "train_held",
    "train_partition",
    "try_in_rank",
]


# A function that computes a rank's result from its rows.
Work = Callable[[HeldRows], RankResult]


class Task(Protocol):
    """A task that a rank of a pool does with its rows."""

    def __call__(self, rows: HeldRows, *, client: Client) -> RankResult:
        """Computes the rank's result from its rows."""
        ...


def train_partition(batches: Iterable[pa.RecordBatch], *, world: World, job: TrainJob, client: Client) -> RankResult:
    """Trains on one partition as one rank.

    Every rank first reads and checks its rows. Only when all ranks have confirmed this through the store, they open the
    process group. So a bad row is an error that names its column, and never a hang.

    Args:
        batches: The partition's record batches, under the encoded names of `job.columns`.
        world: This rank's position among the ranks, and its device.
        job: What to train, and how.
        client: Connects the rank to the driver and to the other ranks.

    Raises:
        ColumnError: The rows cannot be trained on.
        ClusterError: The rows do not fit on disk.
        PeerFailure: Another rank failed before training began.
        Cancelled: The driver cancelled the fit.
    """

    def fit(rows: HeldRows) -> RankResult:
        return rows.fit(job, client)

    return on_rows(batches, world, job, client, fit)


def on_rows(batches: Iterable[pa.RecordBatch], world: World, job: RankJob, client: Client, work: Work) -> RankResult:
    """Returns the result of `work` on a partition's rows, or that they need a new split; raises as `HeldRows` does."""

    def read_and_work() -> RankResult:
        torch.set_num_threads(world.threads)
        forget_peaks("cpu")
        with closing(HeldRows(batches, world, job, client)) as rows:
            if rows.needs_new_split:
                return RankResult({"imbalanced": True, "rows": rows.shard.rows})
            return work(rows)

    # Device memory can be freed only if nothing refers to the rows: that is so when the inner function has returned.
    with leaving_none_of(world.device):
        return read_and_work()


def serve(batches: Iterable[pa.RecordBatch], *, world: World, job: RankJob, client: Client) -> RankResult:
    """Holds the rows of one partition, and runs one task after another on them until the driver ends the pool.

    Each task has its own client, heartbeats and errors. If a task raises an error, the pool goes on.
    """

    def hold(rows: HeldRows) -> RankResult:
        client.enter("holding rows")
        client.post("ready", rows.facts())
        for order in client.orders():
            _carry_out(order, rows, client)
        return RankResult()

    return on_rows(batches, world, job, client, hold)


def train_held(
    rows: HeldRows, *, client: Client, job: TrainJob, judged: bool, without: int | None = None
) -> RankResult:
    """Trains on the rows of a pool's rank, except for those of the fold `without`.

    If `judged`, the driver may end the training after an epoch.
    """
    if judged:
        client.await_verdicts()
    return rows.fit(job, client, without=without)


def run_held(rows: HeldRows, *, client: Client, body: Callable[..., RankResult]) -> RankResult:
    """Runs the body of a barrier task in a pool's rank, without rows."""
    return body(iter(()), world=rows.world, client=client)


def _carry_out(order: Order, rows: HeldRows, client: Client) -> None:
    """Runs a task, and sends its result, or reports its error, to the driver."""
    task_client = client.joined(order)
    device = rows.world.device
    try:
        with task_client.beating(), leaving_none_of(device):
            try:
                forget_peaks("cpu")
                if not is_host(device):
                    forget_peaks(device)
                task: Task = pickle.loads(order.content)  # The driver has signed it.
                result = task(rows, client=task_client)
                task_client.deliver(result.meta, result.payload)
            except Exception as error:
                task_client.fail(error)
                raise
    except Exception as error:
        # The pool goes on, so the frames of the failed task must not keep its memory.
        clear_frames(error)


def try_in_rank(
    batches: Iterable[pa.RecordBatch],
    *,
    world: World,
    client: Client,
    run: Callable[..., DryRunResult],
    config: TrainConfig,
) -> RankResult:
    """Runs the dry run in a rank, on its device; the batches are read to the end and ignored.

    If the device's memory is full, hints follow from the configuration.
    """
    for _ in batches:  # Spark does not reuse a Python worker that leaves input unread.
        pass
    select(world.device)
    with leaving_none_of(world.device), explained(config), client.working("trying the first row"):
        return RankResult(*run(device=world.device).packed())


@contextmanager
def leaving_none_of(device: str) -> Iterator[None]:
    """Context at whose end the process frees device memory; a reused Python worker would keep it otherwise."""
    try:
        yield
    except BaseException as error:
        if not is_host(device):
            clear_frames(error)
            with suppress(Exception):  # After some errors, CUDA answers every call with the same error.
                let_go(device)
        raise
    let_go(device)
