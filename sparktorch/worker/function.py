"""The bodies of barrier tasks that run a user's function or script, in place of the training loop."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import torch
from torch import nn
from torch.utils._pytree import tree_map

from sparktorch.base.devices import select
from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.pause import Paused
from sparktorch.distributed.process_group import process_group
from sparktorch.errors import RankError
from sparktorch.train.numerics.determinism import reproducible
from sparktorch.train.numerics.torch_errors import explained
from sparktorch.worker.held_rows import HeldRows, find_checkpoint
from sparktorch.worker.job import RankJob, RankResult
from sparktorch.worker.rank import leaving_none_of, on_rows
from sparktorch.worker.run_context import RunContext
from sparktorch.worker.torchrun import run_script, torchrun_environment

__all__ = ["called", "run_function", "run_on_elements", "run_on_partition", "run_script_in_rank"]


def called(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any], *first: Any) -> Any:
    """Calls a user's function with `first`, then with the user's arguments."""
    return function(*first, *arguments, **keywords)


def run_on_partition(
    batches: Iterable[pa.RecordBatch], *, world: World, job: RankJob, client: Client, function: Callable[..., Any]
) -> RankResult:
    """Runs a user's function as one rank, on the rows of one partition; the function gets a `RunContext`.

    The batches have the encoded names of `job.columns`. A `RankError` says that the result cannot be pickled.
    """

    def work(rows: HeldRows) -> RankResult:
        # Users' loops may use a process group even if there is a single rank.
        with rows.in_group(job, client, lone=True) as group:
            context = RunContext(rows.world, client, group.config, group=group, checkpointer=group.checkpointer)
            return _call(function, (context,), job, context, client)

    return on_rows(batches, world, job, client, work)


def run_function(
    batches: Iterable[pa.RecordBatch], *, world: World, job: RankJob, client: Client, function: Callable[..., Any]
) -> RankResult:
    """Runs a user's function as one rank, without rows; takes and raises what `run_on_partition` does."""
    return _without_rows(function, (), batches, world, job, client)


def run_on_elements(
    elements: Iterable[Any], *, world: World, job: RankJob, client: Client, function: Callable[..., Any]
) -> RankResult:
    """Runs a user's function as one rank, on the elements of a partition of an RDD.

    The function gets an iterator over the elements, and a context that saves nothing: elements have no identity, so a
    restart could not know whether they are the same.
    """
    return _without_rows(function, (client.moving(elements),), (), world, job, client, saves=False)


def _without_rows(
    function: Callable[..., Any],
    first: tuple[Any, ...],
    batches: Iterable[pa.RecordBatch],
    world: World,
    job: RankJob,
    client: Client,
    *,
    saves: bool = True,
) -> RankResult:
    """Calls a function with the arguments `first` and a context without rows; with `saves`, it can save checkpoints."""
    with leaving_none_of(world.device), _ready(batches, world):
        checkpointer = find_checkpoint(job, {}, world, client) if saves else None
        limit = timedelta(seconds=job.collective_seconds)
        # Users' loops may use a process group even if there is a single rank.
        group = process_group(world, client.store, timeout=limit, lone=True, report=client.fail)
        with checkpointer or nullcontext(), group:
            context = RunContext(world, client, job.config, group=None, checkpointer=checkpointer)
            return _call(function, (*first, context), job, context, client)


def run_script_in_rank(
    batches: Iterable[pa.RecordBatch],
    *,
    world: World,
    client: Client,
    path: Path,
    source: str,
    arguments: Sequence[str],
) -> RankResult:
    """Runs a script for torchrun as one rank; the batches are read to the end and ignored.

    `path` is the script's path on the driver, and `source` its text. A `RankError` says that the exit status is not 0.
    """
    with leaving_none_of(world.device), _ready(batches, world), torchrun_environment(world, client, hosts_store=True):
        client.enter("running")
        client.count_work()
        run_script(path, source, arguments, report=client.fail)
    return RankResult()


def _call(
    function: Callable[..., Any], arguments: tuple[Any, ...], job: RankJob, context: RunContext, client: Client
) -> RankResult:
    """Calls the function; returns its pickled result."""
    with torchrun_environment(context.world, client), reproducible(job.config, context.device), explained(job.config):
        client.enter("running")
        client.count_work()
        try:
            returned = function(*arguments)
        except Paused:
            client.pause.paused = True
            return RankResult({"paused": True})
        except (SystemExit, KeyboardInterrupt) as error:
            raise RankError(
                f"the function raised {type(error).__name__}: {error}",
                hint="return from it, or raise another exception",
            ) from error
        except Exception:
            context.let_save_end()
            raise
        context.finish()
    payload = io.BytesIO()
    try:
        _Pickler(payload, protocol=pickle.HIGHEST_PROTOCOL).dump(tree_map(_detached, returned))
    except Exception as error:
        raise RankError(
            f"what the function returned, a {type(returned).__name__}, cannot be pickled: {error}"
        ) from error
    return RankResult({"rows": 0}, payload.getvalue())


def _detached(value: Any) -> Any:
    """Returns a tensor without its graph, which cannot be pickled; sharded tensors and other values do not change."""
    is_plain = isinstance(value, torch.Tensor) and not hasattr(value, "to_local")
    return value.detach() if is_plain else value


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped.
    """Pickles tensors on the CPU, because the driver may lack their device, and without memory of other tensors."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in (torch.Tensor, nn.Parameter) or obj.layout is not torch.strided:
            return super().reducer_override(obj)
        host = obj.detach().cpu()
        if (
            host.untyped_storage().nbytes() > host.nbytes
        ):  # A view would be pickled with the memory of the whole tensor.
            host = host.clone()
        if isinstance(obj, nn.Parameter):
            host = nn.Parameter(host, obj.requires_grad)
        return host.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


@contextmanager
def _ready(batches: Iterable[pa.RecordBatch], world: World) -> Iterator[None]:
    """Context of a rank without rows, which reads the batches to the end, and sets threads and device."""
    for _ in batches:  # Spark does not reuse a Python worker that leaves input unread.
        pass
    torch.set_num_threads(world.threads)
    select(world.device)
    yield
