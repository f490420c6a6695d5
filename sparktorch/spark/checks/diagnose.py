"""Turns executor reports into findings, without a session."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sparktorch.base.config import Device
from sparktorch.errors import ClusterError
from sparktorch.spark.checks.findings import Finding, Status, found, ok
from sparktorch.spark.launch.gpus import device_index

__all__ = ["FLOORS", "ExecutorReport", "Expected", "diagnose"]

# The oldest releases that ranks support, as in pyproject.toml.
FLOORS = {"torch": "2.10", "numpy": "1.26", "pyarrow": "14.0.1", "safetensors": "0.4"}

_LITTLE_SHARED_MEMORY = 128 << 20  # the default of containers is 64 MiB
_LITTLE_DISK = 1 << 30
_NO_DISK = 64 << 20


class ExecutorReport(SimpleNamespace):
    """The facts of one task, see `executor_probe.answer`; those that could not be found out are `None`."""

    @property
    def place(self) -> dict[str, Any]:
        """For findings that concern all tasks of the executor."""
        return {"host": self.host, "executor": self.executor}

    @property
    def task(self) -> dict[str, Any]:
        """For findings that concern this task."""
        return {**self.place, "rank": self.rank}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What executor reports are compared with."""

    packages: dict[str, dict[str, str]]  # the driver's
    pandas: bool = False  # whether tasks need it, as before Spark 4.1
    driver: str | None  # where executors reach the driver; `None` if rank 0 hosts the store
    executors: frozenset[str] = frozenset()  # their host names, as Spark knows them
    towards: Callable[[str], str] = lambda host: ""  # the driver's local address on the way to a host
    device: Device = "auto"
    world_size: int = 1
    checkpoint_dir: str | None = None


def diagnose(answers: Sequence[ExecutorReport], expected: Expected) -> list[Finding]:
    """Returns a finding per problem and place, and an "ok" finding for each check without problems."""
    executors = list({answer.executor: answer for answer in answers}.values())
    hosts = list({answer.host: answer for answer in executors}.values())
    names = ", ".join(f"{name} {package.get('version', '')}" for name, package in expected.packages.items())
    given = sum(bool(answer.gpus) for answer in answers)
    gpus = f"{given} tasks have one each, and torch sees them" if given else "none: ranks train on the CPU"
    if not given and any(answer.cuda for answer in answers):
        gpus = "Spark gives none, torch sees enough: ranks of a machine take its GPUs in order"
    driver = "not needed: rank 0 hosts the store, not this process"
    if expected.driver:
        driver = f"from all executors ({len(executors)}), on a socket of this job"
    peers, directory = f"all {len(answers)} tasks reach their neighbours", expected.checkpoint_dir
    if any(answer.peers is None for answer in answers):
        peers = "not needed: one task, or one machine"
    python = f"Python {executors[0].python}, and versions that go with the driver's: {names}"
    kept = f"{len(answers)} tasks wrote, read and deleted a file in {directory}" if directory else ""
    loopback = "none resolves to a loopback address" if len(hosts) > 1 else "one machine"
    findings = []
    for check, problems, fine in (
        ("packages", _packages(executors, expected), python),
        ("driver-reachable", _driver(executors, expected), driver),
        ("peers-reachable", _peers(answers), peers),
        ("host-names", _names(hosts, executors, expected), loopback),
        ("gpu-addresses", _gpus(answers, expected), "" if expected.device == "cpu" else gpus),
        ("shared-memory", _shared_memory(hosts), "/dev/shm has room"),
        ("local-disk", _disks(executors), "the local directories have room"),
        ("placement", (), _placement(answers)),
        ("checkpoint-dir", _checkpoints(answers, directory), kept),
    ):
        findings += list(problems) or ([ok(check, fine)] if fine else [])
    return findings


def _packages(executors: Sequence[ExecutorReport], expected: Expected) -> Iterator[Finding]:
    for answer in executors:
        for name in (*FLOORS, "sparktorch", "pandas"):
            status, text = _difference(name, answer, expected)
            if status != "ok":
                cause, wanted = "sparktorch" if name == "sparktorch" else "package", expected.packages.get(name, {})
                words = {"name": name, "wanted": wanted.get("version", "")}
                yield found("packages", status, text, answer.place, cause, **words)


def _difference(name: str, answer: ExecutorReport, expected: Expected) -> tuple[Status, str]:
    there, here = answer.packages.get(name, {}), expected.packages.get(name, {})
    version, wanted, ours = there.get("version"), here.get("version", ""), name == "sparktorch"
    count = 2 if name == "torch" else 1
    if version is None:
        by = "" if ours else f" by {answer.executable}"
        text = f"{name} cannot be imported{by}: {there.get('error', 'it is not installed')}"
        return ("ok", "") if name == "pandas" and not expected.pandas else ("failure", text)
    if ours and version == wanted and there.get("code") != here.get("code"):
        return "warning", f"sparktorch is {version}, but not the driver's code"
    if name in FLOORS and _numbers(version) < _numbers(FLOORS[name]):
        return "failure", f"{name} is {version}, and a rank needs {FLOORS[name]} or newer"
    if version == wanted or (not ours and (not wanted or _numbers(version, count) == _numbers(wanted, count))):
        return "ok", ""
    return "failure" if ours else "warning", f"{name} is {version}, on the driver {wanted}"


def _numbers(version: str, count: int = 3) -> list[int]:
    """Returns the leading numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", version)[:count]]


def _driver(executors: Sequence[ExecutorReport], expected: Expected) -> Iterator[Finding]:
    for answer in executors:
        if answer.driver is not None:
            text = f"does not reach the driver at {expected.driver}: {answer.driver}"
            towards = expected.towards(answer.host)
            value = towards if towards not in ("", expected.driver) else "an address that executors reach"
            such_as = f", such as {towards}" if towards else ""
            yield found("driver-reachable", "failure", text, answer.place, "driver", value=value, such_as=such_as)


def _peers(answers: Sequence[ExecutorReport]) -> Iterator[Finding]:
    for answer in answers:
        for peer, why in (answer.peers or {}).items():
            yield found("peers-reachable", "failure", f"does not reach {peer}: {why}", answer.task, "peers")


def _names(
    hosts: Sequence[ExecutorReport], executors: Sequence[ExecutorReport], expected: Expected
) -> Iterator[Finding]:
    """Finds host names that resolve to a loopback address on a machine, so that others cannot reach it by that name."""
    for answer in hosts if len(hosts) > 1 else ():
        for name, address in sorted(answer.names.items()):
            if not address.startswith("127.") or name in (address, "localhost"):
                continue
            its_own = name == answer.hostname or any(other.names.get(name) == answer.host for other in executors)
            line = f"{answer.host} {name}" if its_own else f"the address of {name} in the network"
            used = name in expected.executors  # executors fetch shuffle blocks from this name
            text = f"{name!r} resolves to {address} there"
            text += ", and is what Spark calls an executor: others cannot fetch rows from it" if used else ""
            status: Status = "failure" if used else "warning"
            yield found("host-names", status, text, {"host": answer.host}, "names", line=line)


def _gpus(answers: Sequence[ExecutorReport], expected: Expected) -> Iterator[Finding]:
    """Finds GPUs that torch does not see, that several tasks were given (NCCL refuses that), and that stay idle."""
    if expected.device == "cpu":
        return
    check, holders = "gpu-addresses", dict[str, list[ExecutorReport]]()
    for answer in answers:
        yield from _unseen(answer)
        address, known = answer.gpus[0] if answer.gpus else "", answer.gpu_uuids
        uuid = known[int(address)] if address.isdigit() and int(address) < len(known) else address
        holders.setdefault(uuid, []).append(answer)
    for uuid, several in holders.items():
        if len(several) > 1 and uuid and not uuid.isdigit():
            text = f"the GPU {uuid} was given to tasks {', '.join(str(holder.rank) for holder in several)}"
            yield found(check, "failure", text, {"host": several[0].host}, "shared gpu")
    ranks = Counter(answer.host for answer in answers if len(answers) == expected.world_size)
    for host, cuda in {answer.host: answer.cuda for answer in answers if answer.cuda and not answer.gpus}.items():
        if ranks[host] > cuda:
            text = f"{ranks[host]} ranks share {cuda} GPUs, and will train on the CPU"
            yield found(check, "warning", text, {"host": host}, "idle gpus", cuda=cuda)


def _unseen(answer: ExecutorReport) -> Iterator[Finding]:
    if not answer.gpus or answer.cuda is None:
        return
    given, visible = answer.gpus[0], answer.cuda_visible_devices
    try:
        index = device_index(given, visible)
    except ClusterError as error:
        yield found("gpu-addresses", "failure", error.what, answer.task, "gpu", hint=error.hint)
    else:
        if index >= answer.cuda:
            seen = f"torch sees {answer.cuda} (CUDA_VISIBLE_DEVICES={visible})"
            text = f"Spark gives GPU {given}, device {index}, but {seen}"
            hint = "install there torch for such devices and their driver; let the script list what torch sees"
            yield found("gpu-addresses", "failure", text, answer.task, "gpu", hint=hint)


def _shared_memory(hosts: Sequence[ExecutorReport]) -> Iterator[Finding]:
    for answer in hosts:
        free = answer.shared_memory
        if free is None or free < _LITTLE_SHARED_MEMORY:
            text = "/dev/shm does not exist" if free is None else f"/dev/shm has {_size(free)} free"
            yield found("shared-memory", "warning", text, {"host": answer.host}, "shared memory")


def _disks(executors: Sequence[ExecutorReport]) -> Iterator[Finding]:
    for answer in executors:
        for path, free in answer.disks.items():
            if free is not None and free < _LITTLE_DISK:
                status: Status = "failure" if free < _NO_DISK else "warning"
                yield found("local-disk", status, f"{path} has {_size(free)} free", answer.place, "disk")


def _placement(answers: Sequence[ExecutorReport]) -> str:
    """Says how many workers of a group can lie on one host, where there are several: groups follow one another."""
    tasks = Counter(answer.host for answer in answers)
    if len(tasks) == 1:
        return ""
    shown = ", ".join(f"{host} {count}" for host, count in tasks.most_common(8))
    largest = math.gcd(*tasks.values())
    lies = f"of {largest} lie on one host" if largest > 1 else "of workers (shard, tensor) lie on several hosts"
    return f"tasks by host: {shown}; groups of strategy 'mesh' {lies}"


def _checkpoints(answers: Sequence[ExecutorReport], directory: str | None) -> Iterator[Finding]:
    writers = {answer.rank for answer in answers if answer.checkpoint is None}
    for answer in answers if directory else ():
        if answer.checkpoint is not None:
            text = f"cannot keep a file in {directory}: {answer.checkpoint}"
            hint = "name a directory that all workers can write, and install the package of its file system on them"
        elif answer.files is not None and writers - set(answer.files):
            text = f"does not see in {directory} what other tasks have written there"
            hint = "name a URL, or an absolute path on a file system that all machines share"
        else:
            continue
        yield found("checkpoint-dir", "failure", text, answer.task, "directory", hint=hint)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
