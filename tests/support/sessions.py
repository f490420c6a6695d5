"""Spark sessions on loopback, one at a time in the process of the tests.

They are quick for settings that users do not have: few shuffle partitions, a compiler for brief JVMs, no
log, executors that find this repository on their path, and Python workers in which torch is imported already.
tests/paths has sessions without any.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from sparktorch.spark.session import other_tasks
from tests.support.programs import ROOT, SPARK_HOME
from tests.support.waiting import until

_REFUSES_CORE = "spark.sql.legacy.setCommandRejectsSparkCoreConfs"


@contextmanager
def spark_session(master: str, warehouse: Path, **settings: str) -> Iterator[SparkSession]:
    """Starts a session, and stops it at the end of the block."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_HOME", str(SPARK_HOME))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")  # the default from pyspark 4.1 on
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "3")
        .config("spark.sql.warehouse.dir", str(warehouse))
        .config("spark.driver.extraJavaOptions", "-Dderby.system.home=/tmp")
        .config("spark.executorEnv.PYTHONPATH", str(ROOT))
        .config("spark.python.daemon.module", "tests.support.daemon")
    )
    for name, value in settings.items():
        builder = builder.config(name.replace("_", "."), value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        session.stop()


@contextmanager
def settings(spark: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    """Changes settings of a live session for the block, the core's too: what Spark itself has read already, stays."""
    changed = {_REFUSES_CORE: "false", **values}
    before = {name: spark.conf.get(name, None) for name in changed}
    try:
        for name, value in changed.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in reversed(before.items()):
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


@contextmanager
def slots_held(spark: SparkSession, count: int, release: Path) -> Iterator[None]:
    """Another job holds so many slots, until the block ends or there is a file `release`."""

    def hold(_: int) -> None:
        deadline = time.monotonic() + 280  # a test has 300 s: its session then stops, and not because of this
        while not release.exists() and time.monotonic() < deadline:
            time.sleep(0.05)  # between looks for the file: Spark has no other way to tell a running task

    with ThreadPoolExecutor(1) as pool:
        try:
            job = pool.submit(spark.sparkContext.range(count, numSlices=count).foreach, hold)

            def held() -> bool:
                return job.done() or other_tasks(spark, "none", (), all_jobs=True) == count

            until(held, seconds=60, what=f"another job holds {count} slots")
            assert not job.done()
            yield
        finally:
            release.touch()
        job.result()
