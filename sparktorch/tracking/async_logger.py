"""A queue of log entries and a thread that sends them to MLflow in order, so that the fit never waits for MLflow."""

from __future__ import annotations

import atexit
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["Outbox", "Sample", "Send"]

_LOG = logging.getLogger(__name__)
_PACE_SECONDS = 1.0  # Between two batches of metrics, there is a pause of so many seconds.
_CLOSE_SECONDS = 10.0  # After so many seconds without a delivery, `close` asks whether the server answers.
_MOST_IDLE = 60  # `close` gives up after so many waits without a delivery in a row.
_PROBE_SECONDS = 5.0
_MOST_METRICS = 1000  # MLflow takes no more metrics in a request.
_MOST_WAITING = 100_000  # The queue holds at most so many values of metrics.
_MOST_REFUSALS = 10  # A request that a reachable server has refused so often is dropped.

Send = Callable[["MlflowClient", str], object]
T = TypeVar("T")

_open: set[Outbox] = set()


class Sample(NamedTuple):
    """A value of a metric; `time` is in milliseconds since 1970."""

    name: str
    value: float
    time: int
    step: int


class Outbox:
    """Queues log entries without blocking; a thread sends them in order and retries.

    Queued metrics are sent in batches. While MLflow is unreachable, entries stay queued, and only the latest metrics.
    An entry that MLflow rejects permanently is dropped with a warning; from a batch, only the metrics with the rejected
    name are dropped.
    """

    def __init__(self, connect: Callable[[], MlflowClient], open_run: Callable[[MlflowClient], str | None]) -> None:
        """Starts the thread. `connect` makes the client; `open_run` returns the run's id, or `None` to log nothing."""
        self.run_id: str | None = None
        self._connect = connect
        self._open_run = open_run
        self._uri = "its tracking URI"
        self._queue: deque[Send | Sample] = deque()
        self._waiting = 0  # The number of metric values in the queue.
        self._leaving = 0  # The number of entries that have left the queue and are not delivered yet.
        self._refused: set[str] = set()  # MLflow has refused the metrics with these names.
        self._changed = threading.Condition()
        self._urged = threading.Event()
        self._closing = False
        self._done = False
        self._attempts = 0
        self._failures = 0  # The number of the last attempts in a row that have failed.
        self._warned: set[tuple[str, str]] = set()
        _open.add(self)
        threading.Thread(target=self._work, name="sparktorch-mlflow", daemon=True).start()

    def send(self, delivery: Send) -> None:
        """Queues a call with the client and the id of the run."""
        self._put([delivery])

    def metrics(self, samples: Iterable[Sample]) -> None:
        """Queues values of metrics."""
        self._put(sample for sample in samples if sample.name not in self._refused)

    def close(self, seconds: float = _CLOSE_SECONDS) -> bool:
        """Closes the queue, waits until all is sent or MLflow turns out to be unreachable; returns whether all is sent.

        The thread goes on to send the rest in the background. `seconds` is how long to wait for a delivery before the
        server is asked whether it answers.
        """
        with self._changed:
            tried = self._attempts
            self._closing = True
            self._changed.notify_all()
            self._urged.set()
        idle = 0
        while idle < _MOST_IDLE:
            with self._changed:
                before = self._attempts
                # One failure may be transient; the next attempt follows within a second.
                settled = self._changed.wait_for(
                    lambda: self._done or (self._attempts > tried and self._failures > 1), timeout=seconds
                )
                idle = 0 if self._attempts > before else idle + 1
            if settled:
                break
            try:
                _probe(self._uri)
            except Exception:
                break
        return self._done

    def __len__(self) -> int:
        return len(self._queue) + self._leaving

    @property
    def uri(self) -> str:
        """The tracking URI, for messages."""
        return self._uri

    def _put(self, items: Iterable[Send | Sample]) -> None:
        with self._changed:
            for item in () if self._done else items:
                self._queue.append(item)
                if isinstance(item, Sample):
                    self._waiting += 1
                if self._waiting > _MOST_WAITING:
                    oldest = next(index for index, queued in enumerate(self._queue) if isinstance(queued, Sample))
                    del self._queue[oldest]
                    self._waiting -= 1
                    self._warn("of the metrics that wait for MLflow at %s, only the latest %d are kept", _MOST_WAITING)
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            client = self._deliver(self._connect)
            self._uri = client.tracking_uri
            self.run_id = self._deliver(partial(self._open_run, client))
            while self.run_id is not None:
                request = self._next_request()
                if not request:
                    break
                self._hand_over(request, client, self.run_id)
                with self._changed:
                    self._leaving = 0
                    # The pause lets metrics gather, which are then sent in one request.
                    if isinstance(request[0], Sample):
                        self._changed.wait_for(lambda: self._closing, timeout=_PACE_SECONDS)
        except Exception as error:
            self._warn("this fit is not logged to MLflow at %s (%s: %s)", type(error).__name__, error)
        finally:
            with self._changed:
                self._queue.clear()
                self._leaving = 0
                self._done = True
                self._changed.notify_all()
            _open.discard(self)

    def _next_request(self) -> list[Send | Sample]:
        """Waits for the next request: one call, or the metrics before the next call; empty once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            request: list[Send | Sample] = []
            while self._queue and len(request) < _MOST_METRICS and isinstance(self._queue[0], Sample):
                request.append(self._queue.popleft())
            self._waiting -= len(request)
            if not request and self._queue:
                request.append(self._queue.popleft())
            self._leaving = len(request)
            return request

    def _hand_over(self, items: list[Send | Sample], client: MlflowClient, run_id: str) -> None:
        """Delivers a request; if MLflow refuses a batch, delivers the metrics with each name by themselves."""
        try:
            self._deliver(partial(_send, items, client, run_id))
        except Exception as error:
            by_name: dict[str, list[Send | Sample]] = {}
            for item in items:
                if isinstance(item, Sample):
                    by_name.setdefault(item.name, []).append(item)
            if not _may_pass(error):
                if len(by_name) > 1:
                    for samples in by_name.values():
                        self._hand_over(samples, client, run_id)
                    return
                self._refused.update(by_name)
            message = "MLflow at %s refused a part of what this fit logs (%s: %s)"
            self._warn(message, type(error).__name__, error, cause=str(error))

    def _deliver(self, send: Callable[[], T]) -> T:
        """Retries until success; raises errors that a retry does not fix."""
        refusals = 0
        pauses = chain((1.0, 2.0, 4.0, 8.0, 16.0), repeat(30.0))
        while True:
            reached = False
            try:
                _probe(self._uri)
                reached = True
                result = send()
            except Exception as error:
                if reached:
                    refusals += 1
                if not _may_pass(error) or refusals == _MOST_REFUSALS:
                    raise
                self._tried(failed=True)
                message = "MLflow at %s cannot be reached (%s: %s): the fit goes on, its log follows later"
                self._warn(message, type(error).__name__, error)
                # `close` cuts the pause short, to try once more before it returns.
                self._urged.wait(next(pauses))
                self._urged.clear()
            else:
                self._tried(failed=False)
                return result

    def _tried(self, *, failed: bool) -> None:
        with self._changed:
            self._attempts += 1
            self._failures = self._failures + 1 if failed else 0
            self._changed.notify_all()

    def _warn(self, message: str, *parts: object, cause: str = "") -> None:
        """Logs a warning once per message and `cause`, which distinguishes errors with the same message."""
        if (message, cause) not in self._warned:
            self._warned.add((message, cause))
            _LOG.warning(message, self._uri, *parts)


def _send(items: list[Send | Sample], client: MlflowClient, run_id: str) -> None:
    from mlflow.entities import Metric

    if callable(items[0]):
        items[0](client, run_id)
    else:
        client.log_batch(run_id, metrics=[Metric(*item) for item in items if isinstance(item, Sample)])


def _probe(uri: str) -> None:
    """Raises an error within seconds if the server does not answer; MLflow's own retries would take minutes."""
    import requests

    if uri.startswith(("http:", "https:")):
        with suppress(requests.exceptions.SSLError):  # With this error, the server has answered.
            requests.head(uri, timeout=_PROBE_SECONDS, allow_redirects=False)


def _may_pass(error: Exception) -> bool:
    """Whether a retry may help: the server does not answer, or has an internal error."""
    import requests
    from mlflow.exceptions import MlflowException

    # Errors of requests for artifacts have a response.
    response = getattr(error, "response", None)
    status: int | None = getattr(response, "status_code", None)
    if isinstance(error, MlflowException):
        # A status for which MLflow has no code counts as an internal error there, but the message has the status.
        in_message = re.search(r"failed with error code (\d{3}) != ", str(error))
        status = int(in_message[1]) if in_message else error.get_http_status_code()
    if status is not None:
        return status >= 500 or status in (408, 429)
    return isinstance(error, requests.RequestException | ConnectionError | TimeoutError)


@atexit.register
def _last_attempt() -> None:
    """Tries once more to send queued entries when the interpreter exits."""
    unreachable: set[str] = set()
    for outbox in list(_open):
        if outbox.uri in unreachable or not outbox.close():
            unreachable.add(outbox.uri)
            _LOG.warning("%d entries of a fit's log have not reached MLflow at %s", len(outbox), outbox.uri)
