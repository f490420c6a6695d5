"""Which errors say that a device has no memory left."""

from __future__ import annotations

import pytest
import torch

from sparktorch.train.numerics.torch_errors import is_out_of_memory


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
