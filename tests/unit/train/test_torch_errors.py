"""Which errors say that a device has no memory left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ClusterError
from sparktorch.train.numerics.torch_errors import explained, is_out_of_memory


def wrapped(cause: Exception) -> Exception:
    error = RuntimeError("while compiling")
    error.__cause__ = cause
    return error


def ring() -> Exception:
    """What `raise error from error` makes."""
    error = wrapped(ValueError())
    error.__cause__ = error
    return error


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (wrapped(torch.OutOfMemoryError("full")), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (ring(), False),
    ],
)
def test_a_full_device_is_known_by_type_text_and_cause(error: Exception, full: bool) -> None:
    assert is_out_of_memory(error) is full


NARROW = "strategyParams={'param_dtype': 'bf16', 'reduce_dtype': 'fp32'}"


@pytest.mark.parametrize(
    ("strategy", "options", "precision", "advice", "not_said"),
    [
        ("ddp", {}, "fp32", "precision='bf16' halves its activations", "param_dtype"),
        ("ddp", {}, "bf16", "strategy='zero3'", "precision="),
        ("zero3", {}, "fp32", NARROW, "precision='bf16' halves"),
        ("mesh", {"tensor": 2}, "bf16", NARROW, "precision='bf16' halves"),
        ("zero2", {"param_dtype": "bf16"}, "fp32", "activation_checkpointing", "precision="),
        ("mesh", {"pipeline": 2}, "fp32", "precision='bf16' halves its activations", "param_dtype"),
    ],
)
def test_a_full_device_is_told_to_narrow_what_its_strategy_keeps(
    strategy: str, options: dict[str, Any], precision: Any, advice: str, not_said: str
) -> None:
    config = TrainConfig(strategy=strategy, strategy_params=options, precision=precision)
    with pytest.raises(ClusterError, match="the memory of the device is full") as caught, explained(config):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert advice in caught.value.hint
    assert not_said not in caught.value.hint
