"""Turns executor reports into check results, without a session."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from sparktorch.errors import ClusterError
from sparktorch.spark.checks.check_result import Finding, Status
from sparktorch.spark.checks.executor_report import ExecutorReport, Expected
from sparktorch.spark.launch.gpus import AMOUNT, device_index

__all__ = ["FLOORS", "diagnose"]

# The oldest releases that ranks support, as in pyproject.toml.
FLOORS = {"torch": "2.10", "numpy": "1.26", "pyarrow": "14.0.1", "safetensors": "0.4"}

_COMPARED = {"torch": 2, "numpy": 1, "pyarrow": 1, "safetensors": 1, "pandas": 1}  # leading numbers of a version
_SCRIPT = "spark.executor.resource.gpu.discoveryScript"
_PYTHON = "spark.pyspark.python"
_PORTS = "net.ipv4.ip_local_port_range, on Linux usually 32768 to 60999"

_LITTLE_SHARED_MEMORY = 128 << 20  # the default of containers is 64 MiB
_LITTLE_DISK = 1 << 30
_NO_DISK = 64 << 20


def diagnose(answers: Sequence[ExecutorReport], expected: Expected) -> list[Finding]:
    """Returns a finding per problem and place, and an "ok" finding for each check without problems."""
    executors = list({answer.executor: answer for answer in answers}.values())
    findings = [
        *_packages(executors, expected),
        *_driver(executors, expected),
        *_peers(answers),
        *_names(executors, expected),
        *_gpus(answers, expected),
        *_shared_memory(executors),
        *_disks(executors),
        *_placement(answers),
    ]
    return findings if expected.checkpoint_dir is None else [*findings, *_checkpoints(answers, expected)]


def _or_ok(problems: Iterable[Finding], check: str, found: str) -> list[Finding]:
    return list(problems) or [Finding(check=check, status="ok", found=found)]


def _packages(executors: Sequence[ExecutorReport], expected: Expected) -> list[Finding]:
    problems = []
    for answer in executors:
        for name in (*FLOORS, "sparktorch", "pandas"):
            problem = _package(name, answer, expected)
            if problem is not None:
                problems.append(problem)
    names = ", ".join(f"{name} {found.get('version', '')}" for name, found in expected.packages.items())
    first = executors[0]
    text = f"Python {first.python}, and versions that go with the driver's: {names}"
    return _or_ok(problems, "packages", text)


def _package(name: str, answer: ExecutorReport, expected: Expected) -> Finding | None:
    there, here = answer.packages.get(name, {}), expected.packages.get(name, {})
    version, wanted = there.get("version"), here.get("version", "")

    def finding(status: Status, found: str, **what: str) -> Finding:
        return Finding(check="packages", status=status, found=found, where=answer.place, **what)

    ours = {"setting": "spark.submit.pyFiles", "value": "dist/sparktorch.zip"}
    if name == "sparktorch":
        ship = (
            "ship the driver's: make zip, then --py-files dist/sparktorch.zip, or spark.addArtifacts(..., pyfile=True)"
        )
        if version is None:
            return finding("failure", f"sparktorch cannot be imported: {there.get('error')}", hint=ship, **ours)
        if version != wanted:
            return finding("failure", f"sparktorch is {version}, on the driver {wanted}", hint=ship, **ours)
        if there.get("code") != here.get("code"):
            return finding("warning", f"sparktorch is {version}, but not the driver's code", hint=ship, **ours)
        return None
    python = {"setting": _PYTHON, "value": f"a Python that has {name} {wanted}", "hint": _environment(name, wanted)}
    if version is None:
        if name == "pandas" and not expected.pandas:
            return None
        return finding("failure", f"{name} cannot be imported by {answer.executable}: {_why(there)}", **python)
    if name in FLOORS and _numbers(version) < _numbers(FLOORS[name]):
        return finding("failure", f"{name} is {version}, and a rank needs {FLOORS[name]} or newer", **python)
    if _numbers(version, _COMPARED[name]) != _numbers(wanted, _COMPARED[name]) and wanted:
        return finding("warning", f"{name} is {version}, on the driver {wanted}", **python)
    return None


def _why(package: dict[str, str]) -> str:
    return package.get("error", "it is not installed")


def _environment(name: str, version: str) -> str:
    return (
        f"install {name} {version} there, or let {_PYTHON} (PYSPARK_PYTHON) name a Python that has it on every executor"
    )


def _numbers(version: str, count: int = 3) -> tuple[int, ...]:
    """Returns the leading numbers of a version."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in release[0].split(".")[:count]) if release else ()


def _driver(executors: Sequence[ExecutorReport], expected: Expected) -> list[Finding]:
    if expected.driver is None:
        text = "not needed: rank 0 hosts the store, not this process"
        return [Finding(check="driver-reachable", status="ok", found=text)]
    problems = []
    for answer in executors:
        if answer.driver is None:
            continue
        towards = expected.towards(answer.host)
        problems.append(
            Finding(
                check="driver-reachable",
                status="failure",
                found=f"does not reach the driver at {expected.driver}: {answer.driver}",
                where=answer.place,
                setting="spark.driver.host",
                value=towards if towards not in ("", expected.driver) else "an address that executors reach",
                hint="set spark.driver.host, and spark.driver.bindAddress where it differs, to an address of the "
                f"driver's machine that executors reach{f', such as {towards}' if towards else ''}; open its "
                f"ephemeral ports to them ({_PORTS}), or set rendezvous='rank0'",
            )
        )
    return _or_ok(problems, "driver-reachable", f"from all executors ({len(executors)}), on a socket of this job")


def _peers(answers: Sequence[ExecutorReport]) -> list[Finding]:
    if any(answer.peers is None for answer in answers):
        return [Finding(check="peers-reachable", status="ok", found="not needed: one task, or one machine")]
    problems = [
        Finding(
            check="peers-reachable",
            status="failure",
            found=f"does not reach {peer}: {why}",
            where={**answer.place, "rank": answer.rank},
            setting="SPARK_LOCAL_IP",
            value="on each machine, its address that the others reach",
            hint=f"open the ephemeral ports ({_PORTS}) between the executors, or set SPARK_LOCAL_IP on each machine "
            "to an address that the others reach",
        )
        for answer in answers
        for peer, why in (answer.peers or {}).items()
    ]
    text = f"all {len(answers)} tasks reach their neighbours"
    return _or_ok(problems, "peers-reachable", text)


def _names(executors: Sequence[ExecutorReport], expected: Expected) -> list[Finding]:
    """Finds host names that resolve to a loopback address on a machine, so that others cannot reach it by that name."""
    check = "host-names"
    if len({answer.host for answer in executors}) == 1:
        return [Finding(check=check, status="ok", found="one machine")]
    problems = []
    for host, answer in {answer.host: answer for answer in executors}.items():
        for name, address in sorted(answer.names.items()):
            if not address.startswith("127.") or name in (address, "localhost"):
                continue
            used = name in expected.executors  # executors fetch shuffle blocks from this name
            its_own = name == answer.hostname or any(other.names.get(name) == host for other in executors)
            line = f"{host} {name}" if its_own else f"the address of {name} in the network"
            problems.append(
                Finding(
                    check=check,
                    status="failure" if used else "warning",
                    found=f"{name!r} resolves to {address} there"
                    + (", and is what Spark calls an executor: others cannot fetch rows from it" if used else ""),
                    where={"host": host},
                    setting="/etc/hosts",
                    value=line,
                    hint=f"let /etc/hosts there say {line!r}, or set SPARK_LOCAL_IP there to its address: what opens "
                    "under this name is not reached from other machines",
                )
            )
    return _or_ok(problems, check, "none resolves to a loopback address")


def _gpus(answers: Sequence[ExecutorReport], expected: Expected) -> list[Finding]:
    if expected.device == "cpu":
        return []
    problems = [problem for answer in answers if (problem := _gpu(answer)) is not None]
    problems += _shared_gpus(answers)
    problems += _too_few_gpus(answers, expected)
    given = sum(bool(answer.gpus) for answer in answers)
    none = "none: ranks train on the CPU" if expected.device == "auto" else "none"
    text = f"{given} tasks have one each, and torch sees them" if given else none
    if not given and any(answer.cuda for answer in answers):
        text = "Spark gives none, torch sees enough: ranks of a machine take its GPUs in order"
    return _or_ok(problems, "gpu-addresses", text)


def _gpu(answer: ExecutorReport) -> Finding | None:
    """Returns a finding if the GPU address that Spark gave a task is no device that torch sees."""
    if not answer.gpus or answer.cuda is None:
        return None
    where = {**answer.place, "rank": answer.rank}
    try:
        index = device_index(answer.gpus[0], answer.cuda_visible_devices)
    except ClusterError as error:
        return Finding(
            check="gpu-addresses",
            status="failure",
            found=error.what,
            where=where,
            setting=_SCRIPT,
            value="a script that lists what CUDA_VISIBLE_DEVICES has, as conf/gpu_discovery.sh does",
            hint=error.hint,
        )
    if index < answer.cuda:
        return None
    return Finding(
        check="gpu-addresses",
        status="failure",
        found=f"Spark gives GPU {answer.gpus[0]}, device {index}, but torch sees {answer.cuda} "
        f"(CUDA_VISIBLE_DEVICES={answer.cuda_visible_devices})",
        where=where,
        setting=_SCRIPT,
        value="a script that lists the devices that torch sees, as conf/gpu_discovery.sh does",
        hint="install the CUDA build of torch and NVIDIA's driver on the executors, and let "
        f"{_SCRIPT} list the devices that torch sees, as conf/gpu_discovery.sh does",
    )


def _shared_gpus(answers: Sequence[ExecutorReport]) -> list[Finding]:
    """Finds GPUs that were given to several tasks, which NCCL refuses."""
    devices: dict[str, list[ExecutorReport]] = {}
    for answer in answers:
        address = answer.gpus[0] if answer.gpus else ""
        known = answer.gpu_uuids
        uuid = known[int(address)] if address.isdigit() and int(address) < len(known) else address
        if uuid and not uuid.isdigit():
            devices.setdefault(uuid, []).append(answer)
    return [
        Finding(
            check="gpu-addresses",
            status="failure",
            found=f"the GPU {uuid} was given to tasks {', '.join(str(holder.rank) for holder in holders)}",
            where={"host": holders[0].host},
            setting=AMOUNT,
            value="all GPUs of a machine, with one executor on each machine",
            hint="two executors of one machine were given the same GPU: let the cluster manager isolate devices, or "
            f"start one executor on each machine, with {AMOUNT} for all of its GPUs",
        )
        for uuid, holders in devices.items()
        if len(holders) > 1
    ]


def _too_few_gpus(answers: Sequence[ExecutorReport], expected: Expected) -> list[Finding]:
    """Finds machines with fewer GPUs than ranks, whose GPUs stay idle."""
    if len(answers) != expected.world_size:
        return []
    ranks = Counter(answer.host for answer in answers)
    hosts = {answer.host: answer.cuda for answer in answers if answer.cuda and not answer.gpus}
    return [
        Finding(
            check="gpu-addresses",
            status="warning",
            found=f"{ranks[host]} ranks share {cuda} GPUs, and will train on the CPU",
            where={"host": host},
            setting="numWorkers",
            value=f"as many as there are GPUs: {cuda} on this machine",
        )
        for host, cuda in hosts.items()
        if ranks[host] > cuda
    ]


def _shared_memory(executors: Sequence[ExecutorReport]) -> list[Finding]:
    problems = []
    for answer in {answer.host: answer for answer in executors}.values():
        free = answer.shared_memory
        if free is not None and free >= _LITTLE_SHARED_MEMORY:
            continue
        problems.append(
            Finding(
                check="shared-memory",
                status="warning",
                found="/dev/shm does not exist" if free is None else f"/dev/shm has {_size(free)} free",
                where={"host": answer.host},
                setting="spark.kubernetes.executor.volumes.emptyDir.shm.mount.path",
                value="/dev/shm",
                hint="NCCL and torch.multiprocessing exchange data there: on Kubernetes set spark.kubernetes.executor."
                "volumes.emptyDir.shm.mount.path=/dev/shm and ...emptyDir.shm.options.medium=Memory; in Docker start "
                "the container with --shm-size=1g",
            )
        )
    least = min((answer.shared_memory or 0 for answer in executors), default=0)
    return _or_ok(problems, "shared-memory", f"/dev/shm has {_size(least)} free or more")


def _disks(executors: Sequence[ExecutorReport]) -> list[Finding]:
    problems = [
        Finding(
            check="local-disk",
            status="failure" if free < _NO_DISK else "warning",
            found=f"{path} has {_size(free)} free",
            where=answer.place,
            setting="spark.local.dir",
            value="a directory with more room",
            hint="the shuffled rows of a fit are kept there: free some, or set spark.local.dir (on Standalone "
            "SPARK_LOCAL_DIRS, on YARN yarn.nodemanager.local-dirs) to a directory with more room",
        )
        for answer in executors
        for path, free in answer.disks.items()
        if free is not None and free < _LITTLE_DISK
    ]
    least = min((free for answer in executors for free in answer.disks.values() if free is not None), default=0)
    return _or_ok(problems, "local-disk", f"{_size(least)} free or more under the local directories")


def _placement(answers: Sequence[ExecutorReport]) -> list[Finding]:
    """Tells how many workers of a group can lie on one host, where there are several: groups follow one another."""
    tasks = Counter(answer.host for answer in answers)
    if len(tasks) == 1:
        return []
    shown = ", ".join(f"{host} {count}" for host, count in tasks.most_common(8))
    largest = math.gcd(*tasks.values())
    lies = f"of {largest} lie on one host" if largest > 1 else "of workers (shard, tensor) lie on several hosts"
    return [Finding(check="placement", status="ok", found=f"tasks by host: {shown}; groups of strategy 'mesh' {lies}")]


def _checkpoints(answers: Sequence[ExecutorReport], expected: Expected) -> list[Finding]:
    problems = []
    writers = {answer.rank for answer in answers if answer.checkpoint is None}
    for answer in answers:
        unseen = writers - set(answer.files) if answer.files is not None else set()
        if answer.checkpoint is not None:
            found = f"cannot keep a file in {expected.checkpoint_dir}: {answer.checkpoint}"
            hint = "name a directory that all workers can write, and install the package of its file system on them"
        elif unseen:
            found = f"does not see in {expected.checkpoint_dir} what other tasks have written there"
            hint = "name a URL, or an absolute path on a file system that all machines share"
        else:
            continue
        problems.append(
            Finding(
                check="checkpoint-dir",
                status="failure",
                found=found,
                where={**answer.place, "rank": answer.rank},
                setting="checkpointDir",
                value="a directory that all workers can write and see",
                hint=hint,
            )
        )
    text = f"{len(answers)} tasks wrote, read and deleted a file in {expected.checkpoint_dir}"
    return _or_ok(problems, "checkpoint-dir", text)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
