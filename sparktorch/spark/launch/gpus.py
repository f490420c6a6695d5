"""Chooses the device of each rank: one rank per GPU, by Spark's GPU addresses."""

from __future__ import annotations

from collections.abc import Sequence

import pyspark
import torch
from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

from sparktorch.base.config import Device
from sparktorch.base.devices import accelerator, device_count, visible_devices
from sparktorch.errors import ClusterError
from sparktorch.spark.compat import gives_profiles
from sparktorch.spark.session import is_connect, is_local, setting

__all__ = ["AMOUNT", "choose_device", "device_index", "gpu_profile", "has_gpus", "on_cpus"]

AMOUNT = "spark.executor.resource.gpu.amount"
TASK_AMOUNT = "spark.task.resource.gpu.amount"


def gpu_profile(spark: SparkSession, device: Device, world_size: int) -> ResourceProfile | None:
    """Returns the resource profile that gives every rank one whole GPU.

    It is `None` if the session's task resources already give each task a GPU, if no GPU is used, or in local mode. A
    `ClusterError` says that there is no GPU, or that pyspark is too old for resource profiles of DataFrames.
    """
    if device == "cpu":
        return None
    local, task = is_local(spark), float(setting(spark, TASK_AMOUNT, "0"))
    gpus, wants_device, what, hint = float(setting(spark, AMOUNT, "0")), device != "auto", "", ""
    count = device_count(device) if local and wants_device else 0
    if local and wants_device and count < world_size:
        what = f"device={device!r} with numWorkers={world_size}, but torch sees {count} such devices on this machine"
        hint = f"set numWorkers={count}, or device='cpu' or 'auto'"
        if not count:
            hint = f"is torch {torch.__version__} a build for it, and its driver installed? Else set device='cpu'"
    elif not local and wants_device and gpus < 1:
        what = f"device={device!r}, but the executors have no GPU"
        hint = f"start the session with {AMOUNT}=1 and "
        hint += "spark.executor.resource.gpu.discoveryScript=conf/gpu_discovery.sh, or set device='cpu'"
    elif local or gpus < 1 or task >= 1:
        # Spark refuses resource profiles in local mode.
        return None
    elif not gives_profiles():
        what = f"pyspark {pyspark.__version__} cannot ask Spark for a GPU a worker"
        hint = f"start the session with {TASK_AMOUNT}=1, which holds for the tasks of all jobs, or set device='cpu'; "
        hint += "pyspark 4.0 and newer ask by themselves"
    if what:
        raise ClusterError(what, hint=hint, code="ST-GPUS")
    cpus = int(setting(spark, "spark.task.cpus", "1"))
    requests = TaskResourceRequests().cpus(cpus).resource("gpu", 1)
    return ResourceProfileBuilder().require(requests).build


def has_gpus(spark: SparkSession, device: Device) -> bool:
    """Whether ranks will have accelerators, as far as the driver knows."""
    if device in ("auto", "cpu"):
        return device == "auto" and (device_count() > 0 if is_local(spark) else float(setting(spark, AMOUNT, "0")) >= 1)
    return True


def on_cpus(spark: SparkSession, device: Device, world_size: int) -> bool:
    """Whether the driver knows that ranks will have no accelerators; on other machines, tasks may see some unasked."""
    if device != "auto" or is_connect(spark) or not is_local(spark):
        return device == "cpu"
    return device_count() < world_size


def choose_device(device: Device, addresses: Sequence[str], *, local_rank: int, local_size: int) -> str:
    """Returns the torch device of one rank, from the GPU addresses that Spark gave its task; runs in the rank."""
    kind = accelerator() if device == "auto" else device
    count = device_count(kind)
    if device == "cpu" or (device == "auto" and not addresses and count < local_size):
        return "cpu"
    index = device_index(addresses[0], visible_devices(kind or "cuda")) if addresses else local_rank
    if kind is None or index >= count:
        raise ClusterError(
            f"this task was to use {kind or 'GPU'} device {index}, but torch sees {count}",
            hint=f"is torch {torch.__version__} a build for such devices where tasks run, and does the GPU discovery "
            "script, where Spark has one, list the devices that torch sees? device='cpu' does without",
            gpu_addresses=list(addresses) or None,
            code="ST-GPUS",
        )
    return f"{kind}:{index}"


def device_index(address: str, visible: str | None) -> int:
    """Returns torch's index of the device at one of Spark's GPU addresses, an index or UUID.

    Spark counts all devices of the machine. If a variable such as `CUDA_VISIBLE_DEVICES` hides some (`visible` is its
    value), torch counts only the visible ones.
    """
    if not visible and address.isdigit():
        return int(address)
    devices = [entry.strip() for entry in (visible or "").split(",")]
    if address not in devices:
        raise ClusterError(
            f"Spark assigned GPU {address}, which CUDA_VISIBLE_DEVICES={visible or ''} hides",
            hint="make the discovery script print indices, or the UUIDs in CUDA_VISIBLE_DEVICES",
            code="ST-GPUS",
        )
    return devices.index(address)
