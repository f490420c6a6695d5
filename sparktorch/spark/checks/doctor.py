"""Runs all checks of a cluster: on the driver, and on the executors by one short barrier job."""

from __future__ import annotations

import json
import platform
import re
import secrets
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import SparkSession

from sparktorch.distributed import addresses
from sparktorch.spark.checks import executor_probe as probe
from sparktorch.spark.checks.findings import ExecutorReport, Expected, Finding, diagnose, finding_for
from sparktorch.spark.checks.preflight import descriptors, enough_slots, gpus, switches
from sparktorch.spark.compat import on_barrier, uses_pandas
from sparktorch.spark.launch.barrier_job import Launch, listening_on_driver
from sparktorch.spark.launch.spark_job import Job, new_tag
from sparktorch.spark.session import is_connect, is_local, java_profile, slots

__all__ = ["check_all", "check_executors"]

# The executors have this time to report, by default.
_SECONDS = 120.0

# What Spark says when tasks cannot start. Each row has a pattern, the check that fails, and the text of its finding,
# which is filled in with the pattern's groups.
_FAILURES = (
    (r"has different version: ([\d.]+) than that in driver: ([\d.]+)", "python", "Python is {0}, on the driver {1}"),
    (r'Cannot run program "([^"]+)"', "python", "the executors have no {0}"),
    (r"(?:ModuleNotFoundError|ImportError|\[PACKAGE_NOT_INSTALLED\]):? (.*)", "packages", "tasks cannot start: {0}"),
)

# Executors may lack this package: the code of these modules is pickled, instead of their names.
for _module in (probe, addresses):
    cloudpickle.register_pickle_by_value(_module)  # type: ignore[no-untyped-call]


def check_all(
    spark: SparkSession, launch: Launch, checkpoint_dir: str | None = None, seconds: float = _SECONDS
) -> list[Finding]:
    """Checks the settings, then the executors, whose reports may take `seconds`."""
    profile, gpus_finding = gpus(spark, launch.device, launch.world_size)
    dynamic_allocation, speculation = switches(spark)
    findings = [dynamic_allocation, speculation, gpus_finding]
    if launch.rendezvous != "rank0" and not is_connect(spark):
        findings.append(descriptors(launch.world_size))
    if dynamic_allocation.status == "failure":
        text = "not looked at: the job that does would be refused"
        return [*findings, _unknown(text, "turn dynamic allocation off, and check again")]
    slots_finding, slot_count = enough_slots(spark, launch.world_size, profile, all_of_them=True, longest=seconds)
    findings.append(slots_finding)
    if slot_count == 0:
        return [*findings, _unknown("there is none to look at", "see to the slots, and check again")]
    return [*findings, *check_executors(spark, replace(launch, profile=profile), checkpoint_dir, seconds)]


def check_executors(
    spark: SparkSession, launch: Launch, checkpoint_dir: str | None = None, seconds: float = _SECONDS
) -> list[Finding]:
    """Checks the executors with one short barrier job, under the conditions of a fit.

    The job has one task per slot, to reach every executor. If other jobs run or slots cannot be counted, it
    has one task per rank. A file is written in the checkpoint directory, and removed.
    """
    token = secrets.token_hex(16)
    tasks = _tasks(spark, launch)
    with ExitStack() as open_sockets:

        def listen(bind: str, advertised: str) -> tuple[str, int]:
            return advertised, open_sockets.enter_context(probe.greeting(bind, token))

        try:
            driver = listening_on_driver(spark, launch, listen)
        except OSError as error:
            return [finding_for("driver-reachable", "failure", f"the driver cannot listen: {error}", {}, "bind")]
        ask = partial(
            probe.answer,
            token=token,
            driver=driver,
            checkpoint_dir=checkpoint_dir,
            gpus=launch.device != "cpu",
            meet=tasks > 1 and not is_local(spark),
        )
        pickled_ask = cloudpickle.dumps(ask)  # type: ignore[no-untyped-call]

        # On executors, this function needs only pyspark and pyarrow.
        def run(batches: Any) -> Any:
            import pickle

            return pickle.loads(pickled_ask)(batches)

        collect = on_barrier(spark.range(0, tasks, 1, tasks), run, probe.ANSWER_SCHEMA, launch.profile)
        job = Job(spark, collect, new_tag())
        job.start()
        try:
            answered = job.wait(seconds)
        finally:
            job.cancel()
    if not answered:
        hint = "are their slots taken by other jobs, or fewer than the workers? See the executors' logs"
        return [_unknown(f"no answer within {seconds:.0f} s", hint)]
    if job.error is not None:
        return [_about_failure(str(job.error))]
    expected = Expected(
        packages=probe.packages(),
        pandas=uses_pandas(),
        driver=driver[0] if driver else None,
        towards=addresses.address_towards,
        device=launch.device,
        world_size=launch.world_size,
        checkpoint_dir=checkpoint_dir,
    )
    answers = (ExecutorReport(**json.loads(row[0])) for row in job.rows)
    return diagnose(sorted(answers, key=lambda answer: answer.rank), expected)


def _tasks(spark: SparkSession, launch: Launch) -> int:
    """Returns the number of tasks: one per slot; at most one per rank if slots are unknown or other jobs run."""
    slot_count = slots(spark, java_profile(launch.profile))
    if slot_count is None:
        return launch.world_size
    if not is_connect(spark) and spark.sparkContext.statusTracker().getActiveStageIds():
        return min(launch.world_size, slot_count or launch.world_size)
    return slot_count


def _unknown(text: str, hint: str) -> Finding:
    """Returns the finding that executors could not be checked."""
    return finding_for("executors", "warning", text, {}, "executors", hint=hint)


def _about_failure(message: str) -> Finding:
    """Returns the finding for a failed job, such as one whose tasks could not start Python."""
    for pattern, check, text in _FAILURES:
        match = re.search(pattern, message)
        if match is not None:
            words = {"version": platform.python_version(), "executable": sys.executable}
            return finding_for(check, "failure", text.format(*match.groups()), {}, "python", **words)
    reason = re.search(r"(?:finished unsuccessfully\.|Job aborted due to stage failure:)\s*(.+)", message)
    first_line = message.strip().partition("\n")[0]
    return finding_for("executors", "failure", reason[1] if reason else first_line, {}, "job")
