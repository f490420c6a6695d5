"""Replaces torch's errors that a Param has caused by errors that name the Param."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ClusterError, ModuleError, SparkTorchError, causes

__all__ = ["explained", "is_out_of_memory"]

_SHARDED = ("zero2", "zero3", "mesh")
_NO_COMPILER = ("InvalidCxxCompiler", "No working C++ compiler", "Failed to find C compiler")
_FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error, or an error that caused it, says that a device has no memory left.

    Libraries under torch have no class for such errors, so their texts count; torch.compile wraps errors, so causes do.
    """
    return any(
        isinstance(cause, torch.OutOfMemoryError)
        or (isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in _FULL))
        for cause in causes(error)
    )


def _error_of_param(config: TrainConfig, text: str, trace: str) -> SparkTorchError | None:
    """Returns an error that names the Param which has caused torch's error; `None` if no Param has caused it.

    `text` is the message of torch's error, and `trace` its traceback.
    """
    first_sentence = text.partition("\n")[0].partition(". ")[0]
    if config.strategy in _SHARDED and "mixed torch.Tensor and DTensor" in text:
        return ModuleError(
            "something computes with parameters of the module outside of its forward pass, where a rank has a part of "
            f"each: {first_sentence}",
            hint="compute with what a call of the module returns, and call its parts instead of reading their weights; "
            "for a penalty on weights, set weight_decay of the optimizer; or use strategy='zero1'",
            param="trainingStep",
            trace=trace,
        )
    if config.compile and any(sign in text for sign in _NO_COMPILER):
        return ClusterError(
            "compile=True needs a C++ compiler on every worker, and this one has none",
            hint="install g++ where the executors run, name it in the environment variable CXX, or leave compile out",
            param="compile",
            trace=trace,
        )
    if config.deterministic and "CUBLAS_WORKSPACE_CONFIG" in text:
        return ClusterError(
            "deterministic=True, but this Python worker has used cuBLAS before without a workspace of its own",
            hint="set spark.executorEnv.CUBLAS_WORKSPACE_CONFIG to :4096:8",
            param="deterministic",
            trace=trace,
        )
    if config.deterministic and "use_deterministic_algorithms(True)" in text:
        return ModuleError(
            f"deterministic=True, but {first_sentence}",
            hint="use another operation in the module, or leave deterministic out",
            param="deterministic",
            trace=trace,
        )
    return None


@contextmanager
def explained(config: TrainConfig) -> Iterator[None]:
    """Context that explains errors of torch.

    An error that a Param has caused becomes an error that names the Param; if a device's memory is full, the error says
    what needs less memory.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        trace = "".join(traceback.format_exception(error))
        if is_out_of_memory(error):
            what = f"the memory of the device is full: {text.splitlines()[0]}"
            hint = _less_memory(config)
            raise ClusterError(what, hint=hint, trace=trace, code="ST-OUT-OF-MEMORY") from error
        error_of_param = _error_of_param(config, text, trace)
        if error_of_param is not None:
            raise error_of_param from error
        raise


def _less_memory(config: TrainConfig) -> str:
    """Returns a hint with ways to save device memory, the cheapest first."""
    ways = ["a smaller microBatchSize takes fewer rows through the module at a time, with the same result"]
    if config.micro_batch_size == "auto":
        ways = [
            "microBatchSize='auto' has halved micro-batches as far as it could; a number below the size that it found, "
            "which logLevel='INFO' shows, needs less memory"
        ]
    options = config.strategy_params
    if config.strategy in _SHARDED and options.get("pipeline", 1) == 1:
        if "param_dtype" not in options:
            ways.append(
                "strategyParams={'param_dtype': 'bf16', 'reduce_dtype': 'fp32'} halves its activations and what it "
                "gathers; precision='bf16' would keep a copy of the whole model"
            )
    elif config.precision in ("fp32", "tf32"):
        ways.append("precision='bf16' halves its activations")
    if config.strategy not in _SHARDED:
        ways.append("strategy='zero3' divides parameters, gradients and the optimizer's state among the workers")
    else:
        ways.append("strategyParams={'activation_checkpointing': True} keeps no activations of its parts")
    ways.append("rows leave the device with storage='disk'; other processes on it show in nvidia-smi")
    return "; ".join(ways)
