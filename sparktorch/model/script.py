"""A TorchScript program as the source of a trained module."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Script"]


@dataclass(frozen=True)
class Script:
    """A program as `torch.jit.save` writes it, with its weights; called like a module class, it returns the module."""

    archive: bytes

    @classmethod
    def of(cls, module: torch.jit.ScriptModule) -> Script:
        """Returns the program of a module."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(module, buffer)
        return cls(buffer.getvalue())

    def __call__(self) -> nn.Module:
        """Returns the module on the CPU."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module: nn.Module = torch.jit.load(  # type: ignore[no-untyped-call]
                io.BytesIO(self.archive), map_location="cpu"
            )
        return module
