"""Findings of the checks: the table of what to do about them, and how executor reports become findings."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from sparktorch.base.config import Device
from sparktorch.errors import ClusterError
from sparktorch.spark.launch.gpus import AMOUNT, device_index

__all__ = ["FLOORS", "ExecutorReport", "Expected", "Finding", "diagnose", "finding_for", "ok", "refuse", "worst"]

_LOG = logging.getLogger(__name__)

Status = Literal["ok", "warning", "failure"]

# The oldest releases that ranks support, as in pyproject.toml.
FLOORS = {"torch": "2.10", "numpy": "1.26", "pyarrow": "14.0.1", "safetensors": "0.4"}

# Free bytes below which a finding warns or, for `_NO_DISK`, fails.
_LITTLE_SHARED_MEMORY = 128 << 20  # Containers have 64 MiB by default.
_LITTLE_DISK = 1 << 30
_NO_DISK = 64 << 20

_PYTHON = "spark.pyspark.python"
_SCRIPT = "spark.executor.resource.gpu.discoveryScript"
_SHM = "spark.kubernetes.executor.volumes.emptyDir.shm"
_PORTS = "net.ipv4.ip_local_port_range, on Linux usually 32768 to 60999"

# What to do about each cause of findings: the setting to change, its value, and a hint. `finding_for` fills in the
# words in braces.
_TO_DO = {
    "switch": ("{name}", "false", "start the session with {name}=false{more}"),
    "descriptors": ("", "", "{hint}"),
    "gpus": ("{name}", "{value}", "{hint}"),
    "slots": (
        "{name}",
        "{value}",
        "set numWorkers={fits}, or start the session with more: {more}{gpus} (master {master!r})",
    ),
    "no executor": ("spark.driver.host", "an address that executors reach", "{hint}"),
    "executors": ("spark.executor.instances", "executors that are free", "{hint}"),
    "job": ("", "", "see the executors' logs"),
    "bind": ("spark.driver.bindAddress", "an address of this machine that executors reach", ""),
    "python": (
        _PYTHON,
        "a Python {version} with torch, numpy, pyarrow and safetensors, at the same path on every executor",
        f"let {_PYTHON} (PYSPARK_PYTHON) name a Python {{version}} that every executor has, with torch, numpy, pyarrow "
        "and safetensors; before Spark 4.1 pandas as well; the driver's is {executable}",
    ),
    "package": (
        _PYTHON,
        "a Python that has {name} {wanted}",
        f"install {{name}} {{wanted}} there, or let {_PYTHON} (PYSPARK_PYTHON) name a Python that has it everywhere",
    ),
    "sparktorch": (
        "spark.submit.pyFiles",
        "dist/sparktorch.zip",
        "ship the driver's: make zip, then --py-files dist/sparktorch.zip, or spark.addArtifacts(..., pyfile=True)",
    ),
    "driver": (
        "spark.driver.host",
        "{value}",
        "set spark.driver.host, and spark.driver.bindAddress where it differs, to an address of the driver's machine "
        f"that executors reach{{such_as}}; open its ephemeral ports to them ({_PORTS}), or set rendezvous='rank0'",
    ),
    "peers": (
        "SPARK_LOCAL_IP",
        "on each machine, its address that the others reach",
        f"open the ephemeral ports ({_PORTS}) between the executors, or set SPARK_LOCAL_IP on each machine to an "
        "address that the others reach",
    ),
    "gpu": (_SCRIPT, "a script that lists the devices that torch sees, as conf/gpu_discovery.sh does", "{hint}"),
    "shared gpu": (
        AMOUNT,
        "all GPUs of a machine, with one executor on each machine",
        "let the cluster manager isolate devices, or start one executor on each machine, with "
        f"{AMOUNT} for all of its GPUs",
    ),
    "idle gpus": ("numWorkers", "as many as there are GPUs: {cuda} on this machine", ""),
    "shared memory": (
        f"{_SHM}.mount.path",
        "/dev/shm",
        f"NCCL and torch.multiprocessing exchange data there: on Kubernetes set {_SHM}.mount.path=/dev/shm and "
        "...emptyDir.shm.options.medium=Memory; in Docker start the container with --shm-size=1g",
    ),
    "disk": (
        "spark.local.dir",
        "a directory with more room",
        "the shuffled rows of a fit are kept there: free some, or set spark.local.dir (on Standalone SPARK_LOCAL_DIRS, "
        "on YARN yarn.nodemanager.local-dirs)",
    ),
    "directory": ("checkpointDir", "a directory that all workers can write and see", "{hint}"),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check in one place.

    Attributes:
        check: Name of the check, stable between versions.
        status: `"failure"` if it would end a fit, `"warning"` if it might end or slow it, otherwise `"ok"`.
        found: The observation: one sentence without a full stop, the same text in every place.
        where: `host`, `executor`, `rank` or `param`; empty if it concerns the session.
        setting: The setting to change; empty if none.
        value: Its new value, or a description of it.
        hint: What to do, if more than changing `setting`.
    """

    check: str
    status: Status
    found: str
    where: dict[str, Any] = field(default_factory=dict)
    setting: str = ""
    value: str = ""
    hint: str = ""

    @property
    def advice(self) -> str:
        """The text that says what the user should do; empty if that is nothing."""
        return self.hint or (f"set {self.setting}={self.value}" if self.setting else "")

    def error(self) -> ClusterError:
        """Returns the finding as the error that ends a fit."""
        return ClusterError(self.found, hint=self.advice, code=f"ST-{self.check.upper()}", **self.where)


def finding_for(check: str, status: Status, text: str, where: dict[str, Any], cause: str, **words: Any) -> Finding:
    """Returns a finding that says what to do about its cause: `words` are filled into the cause's row of `_TO_DO`."""
    setting, value, hint = (part.format(**words) for part in _TO_DO[cause])
    return Finding(check=check, status=status, found=text, where=where, setting=setting, value=value, hint=hint)


def ok(check: str, text: str) -> Finding:
    """Returns the finding of a check without problems."""
    return Finding(check=check, status="ok", found=text)


def worst(findings: Iterable[Finding]) -> Status:
    """Returns the worst status; `"ok"` without findings."""
    return max((finding.status for finding in findings), key=["ok", "warning", "failure"].index, default="ok")


def refuse(findings: Iterable[Finding]) -> None:
    """Logs the warnings, the same warning from many places once, and raises the first failure as a `ClusterError`."""
    warnings: dict[tuple[str, str, str], list[Finding]] = {}
    failure = None
    for finding in findings:
        if finding.status == "failure":
            failure = finding
            break
        if finding.status == "warning":
            warnings.setdefault((finding.check, finding.found, finding.advice), []).append(finding)
    for first, *others in warnings.values():
        _LOG.warning("%s%s", first.error(), f"\n  ... and in {len(others)} other places" if others else "")
    if failure is not None:
        raise failure.error()


class ExecutorReport(SimpleNamespace):
    """The facts of one task, see `executor_probe.answer`; a fact that could not be found out is `None`."""

    @property
    def of_executor(self) -> dict[str, Any]:
        """The `Finding.where` for all tasks of the executor."""
        return {"host": self.host, "executor": self.executor}

    @property
    def of_task(self) -> dict[str, Any]:
        """The `Finding.where` for this task."""
        return {**self.of_executor, "rank": self.rank}


def _no_address(_: str) -> str:
    """Returns no address, for a driver that no host reaches."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What executor reports are compared with.

    Attributes:
        packages: The driver's packages.
        pandas: Whether tasks need pandas, as before Spark 4.1.
        driver: The address at which executors reach the driver; `None` if rank 0 hosts the store.
        towards: Returns the driver's local address on the way to a host.
        device: Device of the ranks, as users choose it.
        world_size: Number of ranks.
        checkpoint_dir: Directory of the checkpoints, `None` without checkpoints.
    """

    packages: dict[str, dict[str, str]]
    pandas: bool = False
    driver: str | None
    towards: Callable[[str], str] = _no_address
    device: Device = "auto"
    world_size: int = 1
    checkpoint_dir: str | None = None


def diagnose(answers: Sequence[ExecutorReport], expected: Expected) -> list[Finding]:
    """Returns a finding per problem and place, and an "ok" finding for each check without problems."""
    executors = list({answer.executor: answer for answer in answers}.values())
    hosts = list({answer.host: answer for answer in executors}.values())
    names = ", ".join(f"{name} {package.get('version', '')}" for name, package in expected.packages.items())
    packages = f"Python {executors[0].python}, and versions that go with the driver's: {names}"
    driver = "not needed: rank 0 hosts the store, not this process"
    if expected.driver:
        driver = f"from all executors ({len(executors)}), on a socket of this job"
    peers = f"all {len(answers)} tasks reach their neighbours"
    if any(answer.peers is None for answer in answers):
        peers = "not needed: one task, or one machine"
    directory = expected.checkpoint_dir
    checkpoints = f"{len(answers)} tasks wrote, read and deleted a file in {directory}" if directory else ""
    findings = []
    # Each check has its problems, and the text for when there are none; without a text, there is nothing to say.
    for check, problems, fine in (
        ("packages", _packages(executors, expected), packages),
        ("driver-reachable", _driver(executors, expected), driver),
        ("peers-reachable", _peers(answers), peers),
        ("gpu-addresses", _gpus(answers, expected), "" if expected.device == "cpu" else _gpus_in_use(answers)),
        ("shared-memory", _shared_memory(hosts), "/dev/shm has room"),
        ("local-disk", _disks(executors), "the local directories have room"),
        ("checkpoint-dir", _checkpoints(answers, directory), checkpoints),
    ):
        check_findings = list(problems)
        if not check_findings and fine:
            check_findings = [ok(check, fine)]
        findings += check_findings
    return findings


def _gpus_in_use(answers: Sequence[ExecutorReport]) -> str:
    """Returns as text on which devices ranks train, if there are no problems."""
    holders = sum(bool(answer.gpus) for answer in answers)
    if holders:
        return f"{holders} tasks have one each, and torch sees them"
    if any(answer.cuda for answer in answers):
        return "Spark gives none, torch sees enough: ranks of a machine take its GPUs in order"
    return "none: ranks train on the CPU"


def _packages(executors: Sequence[ExecutorReport], expected: Expected) -> Iterator[Finding]:
    for answer in executors:
        for name in (*FLOORS, "sparktorch", "pandas"):
            status, text = _difference(name, answer, expected)
            if status != "ok":
                cause = "sparktorch" if name == "sparktorch" else "package"
                driver_info = expected.packages.get(name, {})
                words = {"name": name, "wanted": driver_info.get("version", "")}
                yield finding_for("packages", status, text, answer.of_executor, cause, **words)


def _difference(name: str, answer: ExecutorReport, expected: Expected) -> tuple[Status, str]:
    """Returns how bad it is that an executor lacks a package or has another version than the driver, and the text."""
    on_executor = answer.packages.get(name, {})
    on_driver = expected.packages.get(name, {})
    version = on_executor.get("version")
    driver_version = on_driver.get("version", "")
    is_sparktorch = name == "sparktorch"
    if version is None:
        if name == "pandas" and not expected.pandas:
            return "ok", ""
        python = "" if is_sparktorch else f" by {answer.executable}"
        return "failure", f"{name} cannot be imported{python}: {on_executor.get('error', 'it is not installed')}"
    if is_sparktorch and version == driver_version and on_executor.get("code") != on_driver.get("code"):
        return "warning", f"sparktorch is {version}, but not the driver's code"
    if name in FLOORS and _numbers(version) < _numbers(FLOORS[name]):
        return "failure", f"{name} is {version}, and a rank needs {FLOORS[name]} or newer"
    if version == driver_version:
        return "ok", ""
    text = f"{name} is {version}, on the driver {driver_version}"
    if is_sparktorch:
        return "failure", text
    # Ranks on different minor versions of torch do not understand each other; of other packages, major ones count.
    count = 2 if name == "torch" else 1
    if not driver_version or _numbers(version, count) == _numbers(driver_version, count):
        return "ok", ""
    return "warning", text


def _numbers(version: str, count: int = 3) -> list[int]:
    """Returns the leading `count` numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", version)[:count]]


def _driver(executors: Sequence[ExecutorReport], expected: Expected) -> Iterator[Finding]:
    for answer in executors:
        if answer.driver is not None:
            text = f"does not reach the driver at {expected.driver}: {answer.driver}"
            towards = expected.towards(answer.host)
            value = towards if towards not in ("", expected.driver) else "an address that executors reach"
            such_as = f", such as {towards}" if towards else ""
            yield finding_for(
                "driver-reachable", "failure", text, answer.of_executor, "driver", value=value, such_as=such_as
            )


def _peers(answers: Sequence[ExecutorReport]) -> Iterator[Finding]:
    for answer in answers:
        for peer, why in (answer.peers or {}).items():
            yield finding_for("peers-reachable", "failure", f"does not reach {peer}: {why}", answer.of_task, "peers")


def _gpus(answers: Sequence[ExecutorReport], expected: Expected) -> Iterator[Finding]:
    """Finds GPUs that torch does not see, that Spark has given to several tasks, and that stay idle."""
    if expected.device == "cpu":
        return
    check = "gpu-addresses"
    for answer in answers:
        yield from _unseen(answer)
    for uuid, holders in _holders_of_gpus(answers).items():
        # NCCL refuses a GPU in the hands of two ranks. Tasks on different hosts may have the same index.
        if len(holders) > 1 and not uuid.isdigit():
            text = f"the GPU {uuid} was given to tasks {', '.join(str(holder.rank) for holder in holders)}"
            yield finding_for(check, "failure", text, {"host": holders[0].host}, "shared gpu")
    if len(answers) != expected.world_size:
        return  # How many ranks a host will have is not known.
    ranks_on = Counter(answer.host for answer in answers)
    unassigned = {answer.host: answer.cuda for answer in answers if answer.cuda and not answer.gpus}
    for host, cuda in unassigned.items():
        if ranks_on[host] > cuda:
            text = f"{ranks_on[host]} ranks share {cuda} GPUs, and will train on the CPU"
            yield finding_for(check, "warning", text, {"host": host}, "idle gpus", cuda=cuda)


def _holders_of_gpus(answers: Sequence[ExecutorReport]) -> dict[str, list[ExecutorReport]]:
    """Returns the tasks to which Spark has given each GPU, by its UUID or, where that is unknown, its index."""
    holders: dict[str, list[ExecutorReport]] = {}
    for answer in answers:
        if answer.gpus:
            gpu = answer.gpus[0]
            if gpu.isdigit() and int(gpu) < len(answer.gpu_uuids):
                gpu = answer.gpu_uuids[int(gpu)]
            holders.setdefault(gpu, []).append(answer)
    return holders


def _unseen(answer: ExecutorReport) -> Iterator[Finding]:
    """Finds the GPU that Spark has given to a task if torch does not see it there."""
    if not answer.gpus or answer.cuda is None:
        return
    address = answer.gpus[0]
    visible = answer.cuda_visible_devices
    try:
        index = device_index(address, visible)
    except ClusterError as error:
        yield finding_for("gpu-addresses", "failure", error.what, answer.of_task, "gpu", hint=error.hint)
    else:
        if index >= answer.cuda:
            visible_to_torch = f"torch sees {answer.cuda} (CUDA_VISIBLE_DEVICES={visible})"
            text = f"Spark gives GPU {address}, device {index}, but {visible_to_torch}"
            hint = "install there torch for such devices and their driver; let the script list what torch sees"
            yield finding_for("gpu-addresses", "failure", text, answer.of_task, "gpu", hint=hint)


def _shared_memory(hosts: Sequence[ExecutorReport]) -> Iterator[Finding]:
    for answer in hosts:
        free = answer.shared_memory
        if free is None or free < _LITTLE_SHARED_MEMORY:
            text = "/dev/shm does not exist" if free is None else f"/dev/shm has {_size(free)} free"
            yield finding_for("shared-memory", "warning", text, {"host": answer.host}, "shared memory")


def _disks(executors: Sequence[ExecutorReport]) -> Iterator[Finding]:
    for answer in executors:
        for path, free in answer.disks.items():
            if free is not None and free < _LITTLE_DISK:
                status: Status = "failure" if free < _NO_DISK else "warning"
                yield finding_for("local-disk", status, f"{path} has {_size(free)} free", answer.of_executor, "disk")


def _checkpoints(answers: Sequence[ExecutorReport], directory: str | None) -> Iterator[Finding]:
    if not directory:
        return
    writers = {answer.rank for answer in answers if answer.checkpoint is None}
    all_fine = True
    name_shared = "name a URL, or an absolute path on a file system that all machines share"
    is_relative = "://" not in directory and not os.path.isabs(directory)
    why_relative = "the path is relative, and each process takes it from its own working folder"
    for answer in answers:
        if answer.checkpoint is not None:
            text = f"cannot keep a file in {directory}: {answer.checkpoint}"
            hint = "name a directory that all workers can write, and install the package of its file system on them"
        elif answer.files is not None and writers - set(answer.files):
            text = f"does not see in {directory} what other tasks have written there"
            if is_relative:
                text = f"{text}: {why_relative}"
            hint = name_shared
        else:
            continue
        all_fine = False
        yield finding_for("checkpoint-dir", "failure", text, answer.of_task, "directory", hint=hint)
    if is_relative and all_fine:
        yield finding_for(
            "checkpoint-dir", "warning", f"{directory}: {why_relative}", {}, "directory", hint=name_shared
        )


def _size(count: int) -> str:
    """Returns a number of bytes as text."""
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
