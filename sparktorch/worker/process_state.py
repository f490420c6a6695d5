"""What a user's code may leave behind in a Python worker, which Spark reuses for other tasks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["left_as_before"]


@contextmanager
def left_as_before() -> Iterator[None]:
    """Context after which environment, arguments, import path, folder and torch's defaults are as before."""
    environment, argv, path, folder = dict(os.environ), sys.argv, list(sys.path), os.getcwd()
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    grad, precision = torch.is_grad_enabled(), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.argv, sys.path[:] = argv, path
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        torch.set_grad_enabled(grad)
        torch.set_float32_matmul_precision(precision)
