"""A Standalone cluster of Spark's, each part of it on a host of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.netns import Network
from tests.support.programs import SPARK_HOME, environment
from tests.support.waiting import until

_STARTED = r"Starting Spark master at (spark://\S+)"
_REGISTERED = "(Successfully registered) with master"
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"


class Cluster:
    """A master and a driver on one host, workers on the others."""

    def __init__(self, hosts: Network, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self.url = ""
        self._driver: subprocess.Popen[bytes] | None = None
        # No SPARK_LOCAL_IP: Spark is to find the hosts' addresses by itself, as it does where nobody has set it.
        self._env = environment(SPARK_DAEMON_MEMORY="256m")
        del self._env["SPARK_LOCAL_IP"]

    def start_master(self, host: str) -> None:
        """Starts the master."""
        self._spark_class(host, "master", _MASTER, "--port", "0")
        self.url = self.wait_for("master", _STARTED)

    def start_worker(self, host: str) -> None:
        """Starts a worker of one core; see `wait_for_worker`."""
        work = str(self.directory / f"work-{host}")
        self._spark_class(host, host, _WORKER, self.url, "--cores", "1", "--memory", "600m", "--work-dir", work)

    def wait_for_worker(self, host: str) -> None:
        """Waits until a worker has found its master."""
        self.wait_for(host, _REGISTERED)

    def start_driver(self, host: str, **settings: str) -> None:
        """Starts a driver; see `ask`."""
        names = json.dumps({name.replace("_", "."): value for name, value in settings.items()})
        program = (sys.executable, "-m", "tests.faults.programs.across_hosts", self.url, names)
        with (self.directory / "driver.log").open("wb") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._driver = self.hosts[host].start(program, log, env=self._env, cwd=self.directory, **pipes)

    def ask(self, **request: Any) -> None:
        """Has the driver fit; see `answer`."""
        assert self._driver is not None
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps(request).encode() + b"\n")
        self._driver.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for what the driver says next."""
        assert self._driver is not None
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        assert line, f"the driver has ended:\n{self.log('driver')[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def log(self, name: str) -> str:
        """Returns what the master, the driver, or the worker of a host have logged."""
        return (self.directory / f"{name}.log").read_text()

    def wait_for(self, name: str, pattern: str, *, start: int = 0) -> str:
        """Waits until a log holds a pattern, from one place on, and returns its first group."""
        return _wait_for(self.directory / f"{name}.log", pattern, start)

    def _spark_class(self, host: str, name: str, *arguments: str) -> None:
        command = (str(SPARK_HOME / "bin" / "spark-class"), *arguments, "--webui-port", "0")
        with (self.directory / f"{name}.log").open("wb") as log:
            self.hosts[host].start(command, log, env=self._env, cwd=self.directory)


def _wait_for(log: Path, pattern: str, start: int = 0) -> str:
    found = until(
        lambda: re.search(pattern, log.read_text()[start:]),
        seconds=180,  # for a JVM on a busy machine
        what=lambda: f"{pattern} in {log}:\n{log.read_text()[-4000:]}",
    )
    return str(found[1])


@contextmanager
def on_loopback(directory: Path, env: Mapping[str, str]) -> Iterator[str]:
    """Runs a master and a worker of two cores on loopback, in a user's environment; yields the master's URL."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> Path:
        log = directory / f"{name}.log"
        command = [str(SPARK_HOME / "bin" / "spark-class"), *arguments, "--host", "127.0.0.1", "--webui-port", "0"]
        with log.open("wb") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=dict(env), cwd=directory))
        return log

    try:
        url = _wait_for(start("master", _MASTER, "--port", "0"), _STARTED)
        worker = (_WORKER, url, "--cores", "2", "--memory", "1g", "--work-dir", str(directory / "work"))
        _wait_for(start("worker", *worker), _REGISTERED)
        yield url
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(90)


@contextmanager
def standalone(
    hosts: Network, directory: Path, *, driver: str, workers: tuple[str, ...], **settings: str
) -> Iterator[Cluster]:
    """Runs a cluster with a driver; all of it ends with the network."""
    cluster = Cluster(hosts, directory)
    cluster.start_master(driver)
    for host in workers:
        cluster.start_worker(host)
    cluster.start_driver(driver, **settings)
    for host in workers:
        cluster.wait_for_worker(host)
    yield cluster
