"""Replaces torch's errors that a Param has caused by errors that name the Param."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ClusterError, ModuleError, SparkTorchError

__all__ = ["explained", "is_out_of_memory"]

_SHARDED = ("zero2", "zero3", "mesh")
_FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")
_NOT_DETERMINISTIC = "use_deterministic_algorithms(True)"
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


class _Explained(NamedTuple):
    """An error of torch that a Param has caused: by the configuration and its text, and what is said instead."""

    applies: Callable[[TrainConfig, str], bool]
    kind: type[SparkTorchError]
    what: str  # a template, in which {error} is the first line of torch's error
    hint: str
    param: str


_EXPLAINED = (
    _Explained(
        lambda config, text: config.strategy in _SHARDED and "mixed torch.Tensor and DTensor" in text,
        ModuleError,
        "something computes with parameters of the module outside of its forward pass, where a rank has a part of each:"
        " {error}",
        "compute with what a call of the module returns, and call its parts instead of reading their weights; for a "
        "penalty on weights, set weight_decay of the optimizer; or use strategy='zero1'",
        "trainingStep",
    ),
    _Explained(
        lambda config, text: config.compile and any(sign in text for sign in _NO_COMPILER),
        ClusterError,
        "compile=True needs a C++ compiler on every worker, and this one has none",
        "install g++ where the executors run, name it in the environment variable CXX, or leave compile out",
        "compile",
    ),
    _Explained(
        lambda config, text: config.deterministic and _NOT_DETERMINISTIC in text and "CUBLAS_WORKSPACE_CONFIG" in text,
        ClusterError,
        "deterministic=True, but this Python worker has used cuBLAS before without a workspace of its own",
        "set spark.executorEnv.CUBLAS_WORKSPACE_CONFIG to :4096:8",
        "deterministic",
    ),
    _Explained(
        lambda config, text: config.deterministic and _NOT_DETERMINISTIC in text,
        ModuleError,
        "deterministic=True, but {error}",
        "use another operation in the module, or leave deterministic out",
        "deterministic",
    ),
)


@contextmanager
def explained(config: TrainConfig) -> Iterator[None]:
    """Context that replaces errors that a Param has caused by errors that name the Param, and full device memory."""
    try:
        yield
    except Exception as error:
        text, trace = str(error), "".join(traceback.format_exception(error))
        if is_out_of_memory(error):
            what = f"the memory of the device is full: {text.splitlines()[0]}"
            raise ClusterError(what, hint=_less_memory(config), trace=trace) from error
        row = next((row for row in _EXPLAINED if row.applies(config, text)), None)
        if row is None:
            raise
        what = row.what.format(error=text.splitlines()[0].split(". ")[0])
        raise row.kind(what, hint=row.hint, param=row.param, trace=trace) from error


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
