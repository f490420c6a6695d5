"""Parameters that are divided among ranks (torch's `DTensor`), beside those that are not."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["divided_like", "local", "local_part", "whole"]


def divided_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of something as the whole of it, where the parameter is divided among ranks."""
    if not hasattr(parameter, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, which is all of it unless it is divided among ranks."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that may be divided among ranks as one that is not; where it is, all of them call it."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Returns this rank's part of a tensor, and where in the whole tensor it begins."""
    part = local(tensor)
    if part is tensor:
        return tensor, [0] * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    divided: Any = tensor
    _, offset = compute_local_shape_and_global_offset(divided.shape, divided.device_mesh, divided.placements)
    return part, list(offset)
