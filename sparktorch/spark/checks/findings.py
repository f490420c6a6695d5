"""Findings of the checks, to print, to log, or to raise; and the table of what to do about them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sparktorch.errors import ClusterError
from sparktorch.spark.launch.gpus import AMOUNT

__all__ = ["Finding", "Status", "found", "ok", "refuse", "worst"]

_LOG = logging.getLogger(__name__)

Status = Literal["ok", "warning", "failure"]

_PYTHON = "spark.pyspark.python"
_SCRIPT = "spark.executor.resource.gpu.discoveryScript"
_SHM = "spark.kubernetes.executor.volumes.emptyDir.shm"
_PORTS = "net.ipv4.ip_local_port_range, on Linux usually 32768 to 60999"

# By the cause of a finding: setting, value, hint. What is in braces is filled in.
_TO_DO = {
    "switch": ("{name}", "false", "start the session with {name}=false{more}"),
    "descriptors": ("", "", "raise the limit before the driver starts: ulimit -n {limit}"),
    "gpus": ("{name}", "{value}", "{hint}"),
    "slots": (
        "{name}",
        "{value}",
        "set numWorkers={fits} or less, or start the session with more: spark.executor.instances x "
        "spark.executor.cores / spark.task.cpus{gpus} (master {master!r})",
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
    "names": (
        "/etc/hosts",
        "{line}",
        "let /etc/hosts there say {line!r}, or set SPARK_LOCAL_IP there to its address: what opens under this name is "
        "not reached from other machines",
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
        """What the user should do; empty if nothing."""
        return self.hint or (f"set {self.setting}={self.value}" if self.setting else "")

    def error(self) -> ClusterError:
        """Returns the finding as the error that ends a fit."""
        return ClusterError(self.found, hint=self.advice, **self.where)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form, always with all keys."""
        return asdict(self)


def found(check: str, status: Status, text: str, where: dict[str, Any], cause: str, **words: Any) -> Finding:
    """Returns a finding that says what to do about its cause, from the table, with the words filled in."""
    setting, value, hint = (part.format(**words) for part in _TO_DO[cause])
    return Finding(check=check, status=status, found=text, where=where, setting=setting, value=value, hint=hint)


def ok(check: str, text: str) -> Finding:
    """Returns the finding of a check without problems."""
    return Finding(check=check, status="ok", found=text)


def worst(findings: Iterable[Finding]) -> Status:
    """Returns the worst status; `"ok"` without findings."""
    return max((finding.status for finding in findings), key=["ok", "warning", "failure"].index, default="ok")


def refuse(findings: Iterable[Finding]) -> None:
    """Logs the warnings and raises the first failure.

    Raises:
        ClusterError: There is a failure.
    """
    for finding in findings:
        if finding.status == "failure":
            raise finding.error()
        if finding.status == "warning":
            _LOG.warning("%s", finding.error())
