"""Several fits on the same rows: `fitMultiple`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import finalize

from pyspark.sql import DataFrame

from sparktorch.errors import ConfigError
from sparktorch.ml.fit.prepared_data import FreshData, PreparedData, Source, obstacle
from sparktorch.ml.fit.translate import Request, translate
from sparktorch.spark.compat import inheriting
from sparktorch.spark.launch.spark_job import new_tag
from sparktorch.spark.session import cancel_tasks, tag_tasks
from sparktorch.worker import TrainJob

__all__ = ["fit_multiple"]

_IDLE_SECONDS = 600.0
_AGAIN_SECONDS = 0.5  # A cancelled fit may start other jobs, so they are cancelled again after this time.
_LOOK_SECONDS = 0.1
_MOST_BYTES = 1 << 30  # The fits wait once the models that nobody has taken have so many bytes.


def fit_multiple(estimators: Sequence[Any], dataset: DataFrame | PreparedData) -> Iterator[tuple[int, Any]]:
    """Fits every estimator, those that need the same rows in one barrier job; see `TorchEstimatorBase.fitMultiple`."""
    requests = [translate(estimator, estimator._task) for estimator in estimators]
    _check_checkpoints(requests)
    return _Models(_Work(list(estimators), dataset, requests))


class _Models(Iterator[tuple[int, Any]]):
    """The fitted models with their indices, in order; thread-safe. Garbage collection of it cancels the fits."""

    def __init__(self, work: _Work) -> None:
        self._work, self._lock, self._next_index = work, threading.Lock(), 0
        finalize(self, work.cancel).atexit = False

    def __next__(self) -> tuple[int, Any]:
        """Returns the next model once it is trained, or raises the error of its fit."""
        try:
            with self._lock:
                index = self._next_index
                if index == self._work.count:
                    raise StopIteration
                self._next_index += 1
                self._work.begin()
            return index, self._work.result(index)
        except KeyboardInterrupt:
            self._work.cancel()
            raise


class _Work:
    """The fits, in a thread of their own."""

    def __init__(
        self, estimators: list[Any], dataset: DataFrame | PreparedData, requests: list[Request[TrainJob]]
    ) -> None:
        self.count = len(estimators)
        self._estimators, self._dataset, self._requests = estimators, dataset, requests
        self._futures: list[Future[Any]] = [Future() for _ in estimators]
        self._spark = (dataset.dataset if isinstance(dataset, PreparedData) else dataset).sparkSession
        self._thread: threading.Thread | None = None
        self._held: PreparedData | None = None
        self._tag, self._awaited = new_tag(), set[int]()
        self._cancelled, self._over = False, threading.Event()

    def begin(self) -> None:
        """Starts the fits; the caller holds a lock."""
        if self._thread is None:
            target = inheriting(self._spark, self._fit_all)
            self._thread = threading.Thread(target=target, name="sparktorch-fits", daemon=True)
            self._thread.start()

    def result(self, index: int) -> Any:
        """Waits for a model, and forgets it."""
        self._awaited.add(index)
        try:
            return self._futures[index].result()
        finally:
            self._futures[index] = Future()
            self._awaited.discard(index)

    def cancel(self) -> None:
        """Begins no other fit, and ends the current one, but on rows that the caller has prepared."""
        self._cancelled = True
        if self._thread is not None and not self._over.is_set() and not isinstance(self._dataset, PreparedData):
            # It may be the garbage collector that calls, in any thread.
            threading.Thread(target=self._end_jobs, name="sparktorch-cancel", daemon=True).start()

    def _end_jobs(self) -> None:
        """Cancels the Spark jobs of the current fit, and those that it starts before it sees that it is over."""
        if self._held is not None:
            self._held.cancel()
        with suppress(Exception):  # The session itself may be gone.
            while not self._over.is_set():
                cancel_tasks(self._spark, self._tag)
                self._over.wait(_AGAIN_SECONDS)

    def _fit_all(self) -> None:
        unfinished = set(range(self.count))
        tag_tasks(self._spark, self._tag)
        try:
            for group in self._groups():
                with self._rows(group) as source:
                    for index in group:
                        self._wait_for_takers(source)
                        self._fit_one(index, source)
                        unfinished.discard(index)
        except BaseException as error:  # Rows could not be prepared, or let go; each fit has its errors itself.
            for index in unfinished:
                self._futures[index].set_exception(error)
        finally:
            self._over.set()
            if isinstance(self._dataset, PreparedData):
                self._dataset.title = "fit"

    def _fit_one(self, index: int, source: Source) -> None:
        future = self._futures[index]
        if self._cancelled:
            future.set_exception(CancelledError("the other fits were cancelled"))
            return
        source.title = f"fit {index + 1} of {self.count}"
        try:
            model = self._estimators[index]._fit_on(source)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(model)

    def _wait_for_takers(self, source: Source) -> None:
        """Where untaken models fill the memory, frees the slots until all are taken, or another one is asked for."""
        if self._bytes_ahead() < _MOST_BYTES:
            return
        if isinstance(source, PreparedData):  # Who takes a model may need the slots to score with it.
            source.let_go()
        while self._bytes_ahead() and not self._cancelled:
            time.sleep(_LOOK_SECONDS)

    def _bytes_ahead(self) -> int:
        """Returns the bytes of the models that nobody has taken; 0 if somebody waits for one that is not trained."""
        if any(not self._futures[index].done() for index in list(self._awaited)):
            return 0
        models = [future.result() for future in self._futures if future.done() and future.exception() is None]
        # Weights that are no bytes are in a folder, and take no memory here.
        return sum(len(model.trained.weights) for model in models if isinstance(model.trained.weights, bytes))

    def _groups(self) -> list[list[int]]:
        """Returns the indices of the fits that need the same rows, in the order of their first ones.

        Where ranks cannot hold rows for several fits, each fit is a group of its own.
        """
        if isinstance(self._dataset, PreparedData):
            return [list(range(self.count))]
        groups: list[list[int]] = []
        needs = [request.rows for request in self._requests]
        for index, need in enumerate(needs):
            same_rows = next((group for group in groups if needs[group[0]] == need), None)
            if same_rows is None:
                groups.append([index])
            else:
                same_rows.append(index)
        possible: list[list[int]] = []
        for group in groups:
            if len(group) > 1 and obstacle(self._requests[group[0]], self._dataset.sparkSession) is None:
                possible.append(group)
            else:
                possible += [[index] for index in group]
        return possible

    def _rows(self, group: list[int]) -> AbstractContextManager[Source]:
        """Returns a context with the rows of a group of fits, which `cancel` cancels."""
        if isinstance(self._dataset, PreparedData):
            return nullcontext(self._dataset)
        if len(group) == 1:
            return nullcontext(FreshData(self._dataset))
        first = self._estimators[group[0]]
        self._held = PreparedData(first, first._task, self._dataset, idle_timeout=_IDLE_SECONDS)
        return self._held


def _check_checkpoints(requests: Sequence[Request[TrainJob]]) -> None:
    """Refuses fits that would write their checkpoints into the same directory."""
    directories = set()
    for request in requests:
        directory = None if request.job.checkpoint is None else request.job.checkpoint.directory
        if directory is not None and directory in directories:
            raise ConfigError(
                f"several settings of Params have the checkpointDir {directory!r}, and each is a training of its own",
                hint="give each a checkpointDir in its param map, or set none",
                param="checkpointDir",
            )
        directories.add(directory)
