"""Trained modules as a fit leaves them, made without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparktorch.base.config import Task
from sparktorch.base.imports import load_object
from sparktorch.base.state_dict import pack_state
from sparktorch.data.columns import TensorSpec
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.recipe.dry_run import describe_outputs

FEATURES = TensorSpec(name="x0", column="features", dtype="float32", shape=(5,))


def trained_module(
    source: Any,
    *example: Any,
    task: Task = "generic",
    params: dict[str, Any] | None = None,
    inputs: Sequence[TensorSpec] = (FEATURES,),
    seed: int = 0,
    **more: Any,
) -> TrainedModule:
    """Returns a module with fresh weights, and the outputs that it has of example arguments of `forward`."""
    torch.manual_seed(seed)
    made_by = load_object(source) if isinstance(source, str) else source
    module = made_by if isinstance(made_by, nn.Module) else made_by(**(params or {}))
    with torch.no_grad():
        outputs = describe_outputs(module.eval()(*example or [torch.zeros(2, *spec.shape) for spec in inputs]))
    weights = pack_state(module.state_dict())
    known = {"source": source, "params": params or {}, "weights": weights, "outputs": outputs, "task": task}
    return TrainedModule(**known, inputs=tuple(inputs), **more)  # type: ignore[arg-type]
