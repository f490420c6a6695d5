"""What the network between hosts does to a fit: nothing, or an error that says so, and then a fit that goes on.

The hosts are namespaces of this machine: `driver` with Spark's master, `one` and `two` with a worker each.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.programs.across_hosts import HIDDEN
from tests.support.netns import Host, Network, network
from tests.support.programs import environment
from tests.support.standalone import Cluster, standalone
from tests.support.waiting import until

STALL_SECONDS = 10.0  # ranks of a fit that begins anew import all they need, on a machine that may be busy
STEPS = 30


class Fits:
    """Fits on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._count = 0

    def begin(self, **params: Any) -> None:
        self._count += 1
        self._log_begin = len(self.cluster.log("driver"))
        self.cluster.ask(weights=str(self._weights), **params)

    def begin_up_to(self, step: int, **params: Any) -> Path:
        folder = self.cluster.directory / f"gate-{self._count}"
        folder.mkdir()
        self.begin(gate=[str(folder), step], stallTimeout=STALL_SECONDS, **params)
        until(
            lambda: len(list(folder.iterdir())) == 2,
            seconds=120,
            what=lambda: f"both ranks have taken step {step}:\n{self.cluster.log('driver')[-4000:]}",
        )
        return folder / "open"

    def end(self) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
        answer = self.cluster.answer()
        assert "message" not in answer, answer["message"]
        return answer, np.load(self._weights)

    def restart(self) -> str:
        self.cluster.wait_for("driver", "(restart 1 of )", start=self._log_begin)
        return self.cluster.log("driver")[self._log_begin :]

    @property
    def _weights(self) -> Path:
        return self.cluster.directory / f"weights-{self._count}.npy"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(network("driver", "one", "two", directory=tmp_path_factory.mktemp("hosts")))
        except OSError as error:
            pytest.skip(f"needs hosts in network namespaces: {error}")
        yield made


@pytest.fixture(scope="module")
def at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    directory = tmp_path_factory.mktemp("local")
    path = directory / "weights.npy"
    program = (sys.executable, "-m", "tests.faults.programs.across_hosts", "local[2]", "{}")
    with subprocess.Popen(program, stdin=subprocess.PIPE, text=True, env=environment(), cwd=directory) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"weights": str(path)}) + "\n")
        process.stdin.close()
        yield process, path
        process.kill()


@pytest.fixture(scope="module")
def fits(hosts: Network, at_home: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fits]:
    directory = tmp_path_factory.mktemp("cluster")
    memory = {"spark_executor_memory": "512m", "spark_driver_memory": "512m"}
    with standalone(hosts, directory, driver="driver", workers=("one", "two"), **memory) as cluster:
        cluster.answer()
        yield Fits(cluster)


@pytest.fixture(scope="module")
def calm(at_home: tuple[subprocess.Popen[str], Path]) -> np.ndarray[Any, Any]:
    process, path = at_home
    assert process.wait(120) == 0
    weights: np.ndarray[Any, Any] = np.load(path)
    return weights


@pytest.fixture(autouse=True)
def _heals(hosts: Network) -> Iterator[None]:
    yield
    hosts.heal()


def test_ranks_on_two_hosts_train_the_weights_of_one(hosts: Network, fits: Fits, calm: np.ndarray[Any, Any]) -> None:
    # As on Debian; neither Spark nor Gloo may go by the name.
    asked = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    assert {hosts[name].run(sys.executable, "-c", asked).strip() for name in ("driver", "one")} == {"127.0.1.1"}
    fits.begin()
    answer, weights = fits.end()
    assert set(answer["hosts"]) == {hosts["one"].address, hosts["two"].address}
    assert np.array_equal(weights, calm)


def test_a_network_squeezed_to_1_mbit_makes_a_fit_slow_and_nothing_else(
    hosts: Network, fits: Fits, calm: np.ndarray[Any, Any]
) -> None:
    hosts.squeeze("1mbit")
    fits.begin()
    answer, weights = fits.end()
    parameters = 7 * HIDDEN + 1
    assert answer["seconds"] > 0.9 * STEPS * 32 * parameters / 1e6, "the network was not squeezed"
    assert np.array_equal(weights, calm)


def test_a_cut_between_two_ranks_is_told_as_such_and_a_healed_one_lets_the_fit_go_on(
    hosts: Network, fits: Fits, calm: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    checkpoints = {"checkpointDir": str(tmp_path), "checkpointUnit": "step", "checkpointInterval": 2}
    gate = fits.begin_up_to(7, maxRestarts=3, **checkpoints)
    hosts.part("one", "two")
    gate.touch()
    cut = time.monotonic()
    warned = fits.restart()
    assert time.monotonic() - cut < STALL_SECONDS + 8, "it took too long"
    assert "ranks [0, 1] have waited for each other" in warned
    assert re.search(r"is the network between 10\.77\.0\.[23] and 10\.77\.0\.[32] cut\?", warned)
    assert "Stack of rank 0:" in warned
    assert "Stack of rank 1:" in warned
    hosts.heal()
    _, weights = fits.end()
    assert np.array_equal(weights, calm)


def test_a_host_cut_off_from_all_others_is_named_and_the_fit_goes_on_without_it(
    hosts: Network, fits: Fits, calm: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    # Spark goes on believing in the executor for another minute: its slot is none.
    checkpoints = {"checkpointDir": str(tmp_path), "checkpointUnit": "step", "checkpointInterval": 2}
    gate = fits.begin_up_to(7, maxRestarts=1, minWorkers=1, **checkpoints)
    hosts.unplug("two")
    gate.touch()
    warned = fits.restart()
    assert "does not answer" in warned
    assert f"host={hosts['two'].address}" in warned
    assert "its host is cut off" in warned
    answer, weights = fits.end()
    assert answer["hosts"] == [hosts["one"].address]
    np.testing.assert_allclose(weights, calm, rtol=0, atol=1e-5)


# One name server is silent; the other one, which a resolver asks after five seconds, knows no name.
NAME_SERVERS = """
import socket
silent, other = (socket.socket(type=socket.SOCK_DGRAM) for _ in range(2))
silent.bind(("127.0.0.1", 53))
other.bind(("127.0.0.2", 53))
print("both are bound", flush=True)
while True:
    asked, who = other.recvfrom(4096)
    other.sendto(asked[:2] + bytes([129, 131]) + asked[4:6] + bytes(6) + asked[12:], who)
"""


@pytest.fixture
def _slow_names(hosts: Network, tmp_path: Path) -> Iterator[None]:
    host, given = hosts["one"], tmp_path / "resolv.conf"
    given.write_text("nameserver 127.0.0.1\nnameserver 127.0.0.2\n")
    with (tmp_path / "log").open("wb") as log:
        servers = host.start((sys.executable, "-c", NAME_SERVERS), log, env=environment(), cwd=tmp_path)
    until(lambda: "bound" in (tmp_path / "log").read_text(), seconds=60, what="name servers listen")
    host.run("mount", "--bind", str(given), "/etc/resolv.conf")
    yield
    host.run("umount", "/etc/resolv.conf")
    servers.kill()


@pytest.mark.usefixtures("_slow_names")
def test_names_that_are_looked_up_slowly_make_a_fit_late_and_nothing_else(
    hosts: Network, fits: Fits, calm: np.ndarray[Any, Any]
) -> None:
    asked = f"import socket; print(socket.getnameinfo(('::ffff:{hosts['driver'].address}', 1), 0)[0])"  # as torch does
    begun = time.monotonic()
    hosts["one"].run(sys.executable, "-c", asked)
    assert time.monotonic() - begun > 4, "something answers"
    gate = fits.begin_up_to(7, driverTimeout=4.0)
    time.sleep(8)  # twice the time after which a rank without a word of its driver ends
    gate.touch()
    _, weights = fits.end()
    assert np.array_equal(weights, calm)


@pytest.fixture
def few_ports(hosts: Network) -> Iterator[Host]:
    host, ports = hosts["one"], "/proc/sys/net/ipv4/ip_local_port_range"
    before = host.run("cat", ports)
    host.run("sh", "-c", f"echo 40000 40099 > {ports}")
    yield host
    host.run("sh", "-c", f"echo {before.strip()} > {ports}")


def test_ports_that_others_have_taken_are_in_nobodys_way(few_ports: Host, tmp_path: Path) -> None:
    # Every second one is taken.
    command = (sys.executable, "-m", "tests.faults.programs.few_ports")
    with (tmp_path / "log").open("wb") as log:
        program = few_ports.start(command, log, env=environment(), cwd=tmp_path)
    assert program.wait(100) == 0, (tmp_path / "log").read_text()[-4000:]
