"""An optimizer that a user has built, as a recipe that builds it again on wrapped or sharded parameters."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sparktorch.errors import ModuleError
from sparktorch.train.recipe.lookup import name_of, signature_of
from sparktorch.train.recipe.recipe import Recipe

__all__ = ["recipe_of"]

_KERNELS = ("foreach", "fused")  # `None` leaves the choice to torch


def recipe_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> Recipe:
    """Returns a recipe with the class, options and parameter groups of an optimizer of a module's parameters.

    Call it before a strategy prepares the module, which may replace its parameters, and before the first step.

    Raises:
        ModuleError: The optimizer has state already, or parameters that are not the module's; or it lacks a trainable
            parameter of the module.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    lacking = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in own]
    reasons = (
        (
            any(state.get("step", 1) for state in optimizer.state.values()),  # Adagrad's state begins with a step 0
            "has taken steps already",
            "wrap module and optimizer before the first step",
        ),
        (
            own - names.keys(),
            "has parameters that are not the module's",
            "build it from module.parameters(), of the module that is wrapped",
        ),
        (
            lacking,
            f"lacks the trainable parameters {', '.join(lacking[:3])}",
            "add them to it, or freeze them: parameter.requires_grad_(False)",
        ),
        ("lr" not in optimizer.defaults, "has no learning rate 'lr'", f"it has {signature_of(type(optimizer))}"),
    )
    for applies, what, hint in reasons:
        if applies:
            raise ModuleError(f"optimizer {name_of(type(optimizer))} {what}", hint=hint, code="ST-OPTIMIZER")
    options = _accepted(type(optimizer), optimizer.defaults)
    groups = [
        {
            "params": [glob.escape(names[parameter]) for parameter in group["params"]],
            **{name: value for name, value in group.items() if name in options and value is not options[name]},
            "lr": group["lr"],
        }
        for group in optimizer.param_groups
    ]
    rate = options.pop("lr")
    return Recipe(
        module=module,
        optimizer=type(optimizer),
        optimizer_params=options,
        learning_rate=rate,
        parameter_groups=groups,
    )


def _accepted(kind: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of an optimizer that its constructor takes; a base class may add some."""
    known = inspect.signature(kind).parameters
    every = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    return {
        name: value
        for name, value in defaults.items()
        if (every or name in known) and not (name in _KERNELS and value is None)
    }
