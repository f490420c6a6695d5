"""Replaces torch's errors that a Param has caused by errors that name the Param."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ClusterError, ModuleError

__all__ = ["explained", "is_out_of_memory"]

_SHARDED = ("zero2", "zero3", "mesh")
_FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")
_NO_COMPILER = ("InvalidCxxCompiler", "No working C++ compiler", "Failed to find C compiler")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that a device has no memory left.

    Libraries under torch have no class of their own for it; torch.compile wraps errors.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _FULL):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


@contextmanager
def explained(config: TrainConfig) -> Iterator[None]:
    """Context that replaces errors that a Param has caused by errors that name the Param.

    They are operations that cannot be deterministic, a missing compiler for `compile`, cuBLAS without a workspace, and
    full device memory.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        trace = "".join(traceback.format_exception(error))
        if is_out_of_memory(error):
            raise ClusterError(
                f"the memory of the device is full: {text.splitlines()[0]}",
                hint=_less_memory(config),
                trace=trace,
            ) from error
        if config.strategy in _SHARDED and "mixed torch.Tensor and DTensor" in text:
            raise ModuleError(
                "something computes with parameters of the module outside of its forward pass, where a rank has a part "
                f"of each: {text.splitlines()[0]}",
                hint="compute with what a call of the module returns, and call its parts instead of reading their "
                "weights; for a penalty on weights, set weight_decay of the optimizer; or use strategy='zero1'",
                param="trainingStep",
                trace=trace,
            ) from error
        if config.compile and any(sign in text for sign in _NO_COMPILER):
            raise ClusterError(
                "compile=True needs a C++ compiler on every worker, and this one has none",
                hint="install g++ where the executors run, name it in the environment variable CXX, or leave "
                "compile out",
                param="compile",
                trace=trace,
            ) from error
        if config.deterministic and "use_deterministic_algorithms(True)" in text:
            if "CUBLAS_WORKSPACE_CONFIG" in text:
                raise ClusterError(
                    "deterministic=True, but this Python worker has used cuBLAS before without a workspace of its own",
                    hint="set spark.executorEnv.CUBLAS_WORKSPACE_CONFIG to :4096:8",
                    param="deterministic",
                    trace=trace,
                ) from error
            raise ModuleError(
                f"deterministic=True, but {text.split('. ')[0]}",
                hint="use another operation in the module, or leave deterministic out",
                param="deterministic",
                trace=trace,
            ) from error
        raise


def _less_memory(config: TrainConfig) -> str:
    """Returns a hint with ways to save device memory, the cheapest first."""
    ways = ["a smaller microBatchSize takes fewer rows through the module at a time, with the same result"]
    if config.micro_batch_size == "auto":
        ways = [
            "microBatchSize='auto' has halved micro-batches as far as it could; a number below the size that it found, "
            "which logLevel='INFO' shows, needs less memory"
        ]
    if config.precision in ("fp32", "tf32"):
        ways.append("precision='bf16' halves its activations")
    if config.strategy not in _SHARDED:
        ways.append("strategy='zero3' divides parameters, gradients and the optimizer's state among the workers")
    else:
        ways.append("strategyParams={'activation_checkpointing': True} keeps no activations of its parts")
    ways.append("rows leave the device with storage='disk'; other processes on it show in nvidia-smi")
    return "; ".join(ways)
