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

# Spark's settings for the number of GPUs that an executor has, and that a task gets.
AMOUNT = "spark.executor.resource.gpu.amount"
TASK_AMOUNT = "spark.task.resource.gpu.amount"


def gpu_profile(spark: SparkSession, device: Device, world_size: int) -> ResourceProfile | None:
    """Returns the resource profile that gives every rank one whole GPU.

    It is `None` if the session's task resources already give each task a GPU, if no GPU is used, or in local mode. A
    `ClusterError` says that there is no GPU, or that pyspark is too old for resource profiles of DataFrames.
    """
    if device == "cpu":
        return None
    is_asked_for = device != "auto"
    if is_local(spark):
        # Spark refuses resource profiles in local mode, where ranks take the machine's devices in order.
        if is_asked_for:
            _check_local_devices(device, world_size)
        return None
    if float(setting(spark, AMOUNT, "0")) < 1:
        if is_asked_for:
            raise ClusterError(
                f"device={device!r}, but the executors have no GPU",
                hint=f"start the session with {AMOUNT}=1 and "
                "spark.executor.resource.gpu.discoveryScript=conf/gpu_discovery.sh, or set device='cpu'",
                code="ST-GPUS",
            )
        return None
    if float(setting(spark, TASK_AMOUNT, "0")) >= 1:
        return None
    if not gives_profiles():
        raise ClusterError(
            f"pyspark {pyspark.__version__} cannot ask Spark for a GPU a worker",
            hint=f"start the session with {TASK_AMOUNT}=1, which holds for the tasks of all jobs, or set device='cpu'; "
            "pyspark 4.0 and newer ask by themselves",
            code="ST-GPUS",
        )
    cpus = int(setting(spark, "spark.task.cpus", "1"))
    requests = TaskResourceRequests().cpus(cpus).resource("gpu", 1)
    return ResourceProfileBuilder().require(requests).build


def _check_local_devices(device: Device, world_size: int) -> None:
    """Refuses a device if this machine has fewer such devices than ranks."""
    count = device_count(device)
    if count >= world_size:
        return
    hint = f"set numWorkers={count}, or device='cpu' or 'auto'"
    if not count:
        hint = f"is torch {torch.__version__} a build for it, and its driver installed? Else set device='cpu'"
    raise ClusterError(
        f"device={device!r} with numWorkers={world_size}, but torch sees {count} such devices on this machine",
        hint=hint,
        code="ST-GPUS",
    )


def has_gpus(spark: SparkSession, device: Device) -> bool:
    """Whether ranks will have accelerators, as far as the driver knows."""
    if device != "auto":
        return device != "cpu"
    if is_local(spark):
        return device_count() > 0
    return float(setting(spark, AMOUNT, "0")) >= 1


def on_cpus(spark: SparkSession, device: Device, world_size: int) -> bool:
    """Whether the driver knows that ranks will have no accelerators.

    It does not know that of "auto" on other machines, where tasks may see accelerators that nobody asked for.
    """
    if device != "auto":
        return device == "cpu"
    return is_local(spark) and not is_connect(spark) and device_count() < world_size


def choose_device(device: Device, addresses: Sequence[str], *, local_rank: int, local_size: int) -> str:
    """Returns the torch device of one rank, from the GPU addresses that Spark gave its task; runs in the rank."""
    device_type = accelerator() if device == "auto" else device
    count = device_count(device_type)
    if device == "cpu" or (device == "auto" and not addresses and count < local_size):
        return "cpu"
    index = local_rank
    if addresses:
        index = device_index(addresses[0], visible_devices(device_type or "cuda"))
    if device_type is None or index >= count:
        raise ClusterError(
            f"this task was to use {device_type or 'GPU'} device {index}, but torch sees {count}",
            hint=f"is torch {torch.__version__} a build for such devices where tasks run, and does the GPU discovery "
            "script, where Spark has one, list the devices that torch sees? device='cpu' does without",
            gpu_addresses=list(addresses) or None,
            code="ST-GPUS",
        )
    return f"{device_type}:{index}"


def device_index(address: str, visible: str | None) -> int:
    """Returns torch's index of the device at one of Spark's GPU addresses, an index or UUID.

    Spark counts all devices of the machine. If a variable such as `CUDA_VISIBLE_DEVICES`, whose value is `visible`,
    hides some devices, torch counts only the others.
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
