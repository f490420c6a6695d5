"""A Spark job that its caller can watch, interrupt and cancel, also while it waits for slots."""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress

from pyspark.sql import Row, SparkSession

from sparktorch.spark.compat import Collect, inheriting
from sparktorch.spark.session import cancel_tasks, running_tasks, tag_tasks

__all__ = ["Job", "new_tag"]

_CANCEL_SECONDS = 10.0

_jobs: set[Job] = set()  # of this process, from their start to their end
_lock = threading.Lock()


def new_tag() -> str:
    """Returns a tag that no other job has."""
    return f"sparktorch-{secrets.token_hex(8)}"


class Job:
    """A Spark job, run in a thread of its own.

    Attributes:
        rows: What it has collected, once it is done.
        error: What it ended with in place of rows.
    """

    def __init__(self, spark: SparkSession, collect: Collect, tag: str) -> None:
        """Takes what runs it and returns its rows, and a tag of its own (`new_tag`)."""
        self.rows: list[Row] = []
        self.error: Exception | None = None
        self._spark = spark
        self._tag = tag
        self._done = threading.Event()

        def run() -> None:
            try:
                tag_tasks(spark, self._tag)
                self.rows = collect()  # toArrow() would make one vector of all, which ends at 2 GiB
            except Exception as error:  # handed to the thread that waits
                self.error = error
            finally:
                with _lock:
                    _jobs.discard(self)
                self._done.set()

        # The caller's job group, pool and tags hold for this job too.
        self._thread = threading.Thread(target=inheriting(spark, run), name="sparktorch-job", daemon=True)

    def start(self) -> None:
        """Starts the job."""
        with _lock:
            _jobs.add(self)
        self._thread.start()

    def running_tasks(self) -> int | None:
        """Returns how many of its tasks run, `None` where Spark does not tell."""
        return running_tasks(self._spark, self._tag)

    def is_starved(self) -> bool:
        """Whether none of its tasks runs, and none of another `Job` of this process, whose end will leave it slots."""
        if self.running_tasks() != 0:
            return False
        with _lock:
            others = _jobs - {self}
        return not any(job.running_tasks() for job in others)

    def wait(self, seconds: float) -> bool:
        """Waits for its end, at most so long; returns whether it has come."""
        return self._done.wait(seconds)

    def cancel(self) -> None:
        """Cancels what of it is not done, and waits a while for its end."""
        if self._done.is_set():
            return
        with suppress(Exception):  # the session itself may be gone
            cancel_tasks(self._spark, self._tag)
        self._done.wait(_CANCEL_SECONDS)
