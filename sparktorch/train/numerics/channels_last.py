"""The channels-last memory format, in which convolutions are fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["channels_last"]


def channels_last(module: nn.Module) -> None:
    """Converts the module's 4-D weights, and the 4-D inputs of every call, to `torch.channels_last`."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module.register_forward_pre_hook(_lay_out, with_kwargs=True)


def _lay_out(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(_last(value) for value in args), {name: _last(value) for name, value in kwargs.items()}


def _last(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value
