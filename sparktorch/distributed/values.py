"""The values that users' collectives take: as tensors that backends can send and reduce, and back."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["OPERATIONS", "Reduction", "as_bytes", "as_tensor", "check_operation", "like", "operation_of", "reducible"]

Reduction = Literal["sum", "mean", "product", "min", "max"]

V = TypeVar("V")

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_REDUCIBLE = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8),
    *(torch.uint8, torch.complex64, torch.complex128),
}


def operation_of(op: str) -> Any:
    """Returns the operation of torch's collectives.

    Raises:
        ValueError: There is no such operation.
    """
    if op not in OPERATIONS:
        raise ValueError(f"op must be one of {', '.join(map(repr, OPERATIONS))}, got {op!r}")
    return OPERATIONS[op]


def check_operation(op: str, tensor: torch.Tensor) -> None:
    """Checks that values of a dtype can be reduced by an operation.

    Raises:
        TypeError: They cannot.
    """
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"op='mean' is for floating-point values, got {tensor.dtype}")
    if tensor.dtype is torch.bool and op not in ("min", "max"):
        raise TypeError(
            f"op={op!r} is for numbers, got torch.bool: make it int64, or take 'max' for any and 'min' for all"
        )
    if tensor.dtype is torch.uint64 and op in ("min", "max"):
        raise TypeError(f"op={op!r} cannot order torch.uint64: make it int64")


def as_tensor(value: Any) -> torch.Tensor:
    """Returns a value as a detached, contiguous tensor, which may share its memory."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or hasattr(value, "to_local"):
            raise TypeError("collectives take dense tensors, neither sparse, jagged nor sharded ones")
        return value.detach().resolve_conj().resolve_neg().contiguous()
    if isinstance(value, np.ndarray):
        native = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])  # a copy only where it must be
        return torch.from_numpy(native.reshape(value.shape))
    if isinstance(value, bool | int | float | complex | np.generic):
        return torch.tensor(value.item() if isinstance(value, np.generic) else value, dtype=_wide(value))
    raise TypeError(f"collectives take tensors, NumPy arrays and numbers, got {type(value).__name__}")


def _wide(number: Any) -> torch.dtype | None:
    if isinstance(number, float | np.floating):
        return torch.float64
    return torch.complex128 if isinstance(number, complex | np.complexfloating) else None


def reducible(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Returns a copy in a dtype that all backends can reduce, and in which a sum for a mean does not overflow."""
    if op == "mean" and tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor.clone() if tensor.dtype in _REDUCIBLE else tensor.to(torch.int64)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor, uint8 of shape `(bytes,)`."""
    return tensor.reshape(-1).view(torch.uint8)


def like(value: V, tensor: torch.Tensor) -> V:
    """Returns a tensor as the kind of value that another one is."""
    found: Any = tensor
    if isinstance(value, np.ndarray):
        found = tensor.numpy()
    elif not isinstance(value, torch.Tensor):
        found = tensor.item()
    return found  # type: ignore[no-any-return]
