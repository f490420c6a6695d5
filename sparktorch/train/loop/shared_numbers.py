"""Numbers of a training that are the same in all ranks, unless a hook has changed the training in some of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from sparktorch.train.loop.engine import Engine
from sparktorch.train.recipe.lookup import parameters_of
from sparktorch.train.recipe.recipe import KERNELS

__all__ = ["shared_numbers"]

# Schedulers may change these options of optimizers.
_HYPERPARAMETERS = {"lr", "momentum", "betas", "weight_decay"}
# Longer tensors are summed in parts of this length, because torch copies them to float64 on CPUs.
_PART_ELEMENTS = 1 << 24


@torch.no_grad()
def shared_numbers(engine: Engine) -> dict[str, float]:
    """Returns numbers of this rank that must be equal in all ranks under its strategy, by their names in messages.

    Buffers are left out, because each rank has running statistics of its own.
    """
    module = engine.unwrapped
    strategy_kind = engine.strategy_kind
    optimizer = getattr(engine.optimizer, "optim", engine.optimizer)  # `zero1` wraps an optimizer.
    names = sorted(_HYPERPARAMETERS | parameters_of(type(optimizer)).keys() - {"params", *KERNELS})
    groups = [_hyperparameters(group, names) for group in engine.optimizer.param_groups]
    numbers = {"hyperparameters of the optimizer": _digest(groups)}
    if not strategy_kind.runs_passes:  # Each rank of a pipeline has other parameters.
        numbers["parameters that require a gradient"] = _digest([p.requires_grad for p in module.parameters()])
    if strategy_kind.same_weights:
        sums: list[torch.Tensor] = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                sums += _absolute_sums(parameter)
        numbers["weights"] = float(torch.stack(sums).sum()) if sums else 0.0
    return numbers


def _hyperparameters(group: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    """Returns the named options of an optimizer's group that are numbers; a group also holds its parameters."""
    return [(name, _rounded(group[name])) for name in names if name in group and _is_number(group[name])]


def _is_number(value: Any) -> bool:
    """Returns whether a value is a number, a bool or a sequence of numbers and bools; a tensor is none of these."""
    if isinstance(value, tuple | list):
        return all(map(_is_number, value))
    return isinstance(value, Real)


def _rounded(value: Any) -> Any:
    """Returns a hyperparameter as text, without its last digits: the libraries of two hosts may round differently."""
    if isinstance(value, tuple | list):
        return [_rounded(item) for item in value]
    return f"{float(value):.6g}"


def _digest(value: object) -> float:
    """Returns a digest of 48 bits, which float64 holds exactly."""
    return float(int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:6], "big"))


def _absolute_sums(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Returns the sum of the absolute values of each part of a parameter, float64; nothing for integers."""
    real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    if not real.is_floating_point():
        return []
    parts = torch.split(real.reshape(-1), _PART_ELEMENTS)
    return [torch.linalg.vector_norm(part, 1, dtype=torch.float64) for part in parts]
