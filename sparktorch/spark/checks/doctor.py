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
from pyspark.sql import Row, SparkSession

from sparktorch.distributed import addresses
from sparktorch.spark.checks import executor_probe as probe
from sparktorch.spark.checks.check_result import Finding
from sparktorch.spark.checks.diagnose import diagnose
from sparktorch.spark.checks.executor_report import ExecutorReport, Expected
from sparktorch.spark.checks.preflight import descriptors, dynamic_allocation, enough_slots, gpus, speculation
from sparktorch.spark.compat import Collect, on_barrier, uses_pandas
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.spark.launch.spark_job import Job, new_tag
from sparktorch.spark.session import driver_address, is_connect, is_local, setting, slots

__all__ = ["check_all", "check_executors"]

_SECONDS = 120.0

for _module in (probe, addresses):  # executors may lack this package
    cloudpickle.register_pickle_by_value(_module)  # type: ignore[no-untyped-call]


def check_all(
    spark: SparkSession, launch: Launch, checkpoint_dir: str | None = None, seconds: float = _SECONDS
) -> list[Finding]:
    """Checks the settings, then the executors.

    Args:
        spark: The session.
        launch: How a fit would launch its ranks; its `profile` is determined here.
        checkpoint_dir: Checkpoint directory of a fit, `None` for none.
        seconds: Timeout for the executors' reports, in seconds.
    """
    found = [dynamic_allocation(spark), speculation(spark)]
    profile, finding = gpus(spark, launch.device, launch.world_size)
    found.append(finding)
    if launch.rendezvous != "rank0" and not is_connect(spark):
        found.append(descriptors(launch.world_size))
    if found[0].status == "failure":
        text = "not looked at: the job that does would be refused"
        hint = "turn dynamic allocation off, and check again"
        return [*found, _about_job("warning", text, hint)]
    launch = replace(launch, profile=profile)
    finding, there = enough_slots(spark, launch.world_size, profile, all_of_them=True, longest=seconds)
    found.append(finding)
    if there == 0:
        return [*found, _about_job("warning", "there is none to look at", "see to the slots, and check again")]
    return [*found, *check_executors(spark, launch, checkpoint_dir, seconds)]


def check_executors(
    spark: SparkSession, launch: Launch, checkpoint_dir: str | None = None, seconds: float = _SECONDS
) -> list[Finding]:
    """Checks the executors with one short barrier job, under the conditions of a fit.

    The job has one task per slot, to reach every executor. If other jobs run or slots cannot be counted, it
    has one task per rank.

    Args:
        spark: The session.
        launch: How a fit would launch its ranks, with their profile.
        checkpoint_dir: Checkpoint directory of a fit, `None` for none; a file is written there, and removed.
        seconds: Timeout for the executors' reports, in seconds.

    Returns:
        A finding per problem and place, and an "ok" finding for each check without problems.
    """
    token, names = secrets.token_hex(16), _executor_hosts(spark)
    with ExitStack() as stack:
        try:
            driver = _listen(spark, launch, token, stack)
        except OSError as error:
            return [_about_listening(error)]
        plan = _plan(
            spark,
            launch,
            token=token,
            driver=driver,
            checkpoint_dir=checkpoint_dir,
            names=sorted(names),
            cuda=launch.device != "cpu",
        )
        try:
            rows = _collect(spark, plan, seconds)
        except TimeoutError as error:
            return [
                _about_job(
                    "warning",
                    str(error),
                    "are their slots taken by other jobs, or fewer than the workers? See the executors' logs",
                )
            ]
        except Exception as error:  # of Spark's, of many kinds
            return [_about_failure(str(error))]
    answers = sorted((ExecutorReport(**json.loads(row[0])) for row in rows), key=lambda answer: answer.rank)
    expected = Expected(
        packages=probe.packages(),
        pandas=uses_pandas(),
        driver=driver[0] if driver else None,
        executors=names,
        towards=addresses.address_towards,
        device=launch.device,
        world_size=launch.world_size,
        checkpoint_dir=checkpoint_dir,
    )
    return diagnose(answers, expected)


def _executor_hosts(spark: SparkSession) -> frozenset[str]:
    """Returns the host names of the executors in Spark; empty in local mode, and on Connect, where they are unknown."""
    if is_connect(spark) or is_local(spark):
        return frozenset()
    context: Any = spark.sparkContext._jsc.sc()
    hosts = {str(info.host()) for info in context.statusTracker().getExecutorInfos()}
    return frozenset(hosts - {setting(spark, "spark.driver.host")})  # the list includes the driver


def _listen(spark: SparkSession, launch: Launch, token: str, stack: ExitStack) -> tuple[str, int] | None:
    """Listens like a fit's store; returns host and port, or `None` if rank 0 would host the store."""
    address = driver_address(spark)
    if launch.rendezvous == "rank0" or address is None:
        return None
    bind, advertise = address
    try:
        return advertise, stack.enter_context(probe.greeting(bind, token))
    except OSError:
        if launch.rendezvous == "auto" and is_connect(spark):
            return None  # through a tunnel, the server's address is not one of this machine
        raise


def _plan(spark: SparkSession, launch: Launch, **question: Any) -> Collect:
    """Returns a callable that collects the reports, one per row; on executors it needs only pyspark and pyarrow."""
    tasks = _tasks(spark, launch)
    ask = partial(probe.answer, meet=tasks > 1 and not is_local(spark), **question)
    packed = cloudpickle.dumps(ask)  # type: ignore[no-untyped-call]

    def run(batches: Any) -> Any:
        import pickle

        return pickle.loads(packed)(batches)

    return on_barrier(spark.range(0, tasks, 1, tasks), run, probe.ANSWER_SCHEMA, launch.profile)


def _tasks(spark: SparkSession, launch: Launch) -> int:
    """Returns the number of tasks: one per slot; at most one per rank if slots are unknown or other jobs run."""
    profile = None if launch.profile is None else launch.profile._java_resource_profile
    found = slots(spark, profile)
    if found is None or (not is_connect(spark) and spark.sparkContext.statusTracker().getActiveStageIds()):
        return min(launch.world_size, found or launch.world_size)
    return found


def _collect(spark: SparkSession, plan: Collect, seconds: float) -> list[Row]:
    """Collects the rows; cancels the job after `seconds` or on an interrupt.

    Raises:
        TimeoutError: The job took longer.
        Exception: The job failed; Spark's exception.
    """
    job = Job(spark, plan, new_tag())
    job.start()
    try:
        if not job.wait(seconds):
            raise TimeoutError(f"no answer within {seconds:.0f} s")
    finally:
        job.cancel()
    if job.error is not None:
        raise job.error
    return job.rows


def _about_job(status: Any, found: str, hint: str) -> Finding:
    return Finding(
        check="executors",
        status=status,
        found=found,
        setting="spark.executor.instances",
        value="executors that are free",
        hint=hint,
    )


def _about_listening(error: OSError) -> Finding:
    return Finding(
        check="driver-reachable",
        status="failure",
        found=f"the driver cannot listen: {error}",
        setting="spark.driver.bindAddress",
        value="an address of this machine that executors reach",
    )


def _about_failure(message: str) -> Finding:
    """Returns the finding for a failed job, such as one whose tasks could not start Python."""
    versions = re.search(r"worker has different version: ([\d.]+) than that in driver: ([\d.]+)", message)
    if versions is not None:
        return _about_python("python", f"Python is {versions[1]}, on the driver {versions[2]}", versions[2])
    program = re.search(r'Cannot run program "([^"]+)"', message)
    if program is not None:
        return _about_python("python", f"the executors have no {program[1]}", platform.python_version())
    missing = re.search(r"(?:ModuleNotFoundError|ImportError|\[PACKAGE_NOT_INSTALLED\]):? (.*)", message)
    if missing is not None:
        return _about_python("packages", f"tasks cannot start: {missing[1]}", platform.python_version())
    reason = re.search(r"(?:finished unsuccessfully\.|Job aborted due to stage failure:)\s*(.+)", message)
    return Finding(
        check="executors",
        status="failure",
        found=reason[1] if reason else message.strip().partition("\n")[0],
        hint="see the executors' logs",
    )


def _about_python(check: str, found: str, version: str) -> Finding:
    return Finding(
        check=check,
        status="failure",
        found=found,
        setting="spark.pyspark.python",
        value=f"a Python {version} with torch, numpy, pyarrow and safetensors, at the same path on every executor",
        hint=f"let spark.pyspark.python (PYSPARK_PYTHON) name a Python {version} that every executor has, with torch, "
        f"numpy, pyarrow and safetensors; before Spark 4.1 pandas as well; the driver's is {sys.executable}",
    )
