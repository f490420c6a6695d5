"""A Spark job that the caller can monitor and cancel, even while it waits for slots."""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress

from pyspark.sql import Row, SparkSession

from sparktorch.spark.compat import Collect, inheriting
from sparktorch.spark.session import cancel_tasks, running_tasks, tag_tasks

__all__ = ["Job", "new_tag", "others_wait"]

_CANCEL_SECONDS = 10.0

_jobs: set[Job] = set()  # The jobs of this process are here from their start to their end.
_lock = threading.Lock()


def new_tag() -> str:
    """Returns a new, unique job tag."""
    return f"sparktorch-{secrets.token_hex(8)}"


def others_wait(tag: str) -> bool:
    """Whether a job of this process other than the one with `tag` has no running task: it may wait for slots."""
    with _lock:
        others = [job for job in _jobs if job.tag != tag]
    return any(job.running_tasks() == 0 for job in others)


class Job:
    """A Spark job, run in a thread of its own.

    Attributes:
        rows: The collected rows, once the job is done.
        error: The job's exception, once it has failed.
        idle: Whether the job's tasks wait for work: then others that wait for their slots wait in vain.
        tag: The job's tag.
    """

    def __init__(self, spark: SparkSession, collect: Collect, tag: str) -> None:
        """Takes a callable that runs the job and returns its rows, and a unique tag from `new_tag`."""
        self.rows: list[Row] = []
        self.error: Exception | None = None
        self.idle = False
        self._spark = spark
        self.tag = tag
        self._done = threading.Event()

        def run() -> None:
            try:
                # Spark tags the jobs that this thread starts, not jobs of the thread that made this one.
                tag_tasks(spark, self.tag)
                # toArrow() would make one vector of all rows, which is limited to 2 GiB.
                self.rows = collect()
            except Exception as error:  # The thread that waits for the job raises it.
                self.error = error
            finally:
                with _lock:
                    _jobs.discard(self)
                self._done.set()

        # The job inherits the caller's job group, pool and tags.
        self._thread = threading.Thread(target=inheriting(spark, run), name="sparktorch-job", daemon=True)

    def start(self) -> None:
        """Starts the job."""
        with _lock:
            _jobs.add(self)
        self._thread.start()

    def running_tasks(self) -> int | None:
        """Returns the number of the job's running tasks; `None` if Spark does not tell."""
        return running_tasks(self._spark, self.tag)

    def is_starved(self) -> bool:
        """Whether no task of this job runs, nor one of another busy `Job` of this process, which would free slots."""
        if self.running_tasks() != 0:
            return False
        with _lock:
            others = {job for job in _jobs if job is not self and not job.idle}
        return not any(job.running_tasks() for job in others)

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` for the end of the job; returns whether it has ended."""
        return self._done.wait(seconds)

    def cancel(self) -> None:
        """Cancels the job unless it is done, and waits at most 10 s for its end."""
        if self._done.is_set():
            return
        with suppress(Exception):  # The session itself may be gone.
            cancel_tasks(self._spark, self.tag)
        self._done.wait(_CANCEL_SECONDS)
