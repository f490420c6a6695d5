"""Refuses losses and training steps that have tensors which a training would have to train or to save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sparktorch.errors import ModuleError
from sparktorch.train.recipe.loss import Loss, TrainingStep

__all__ = ["check_parameters", "unchanged_buffers"]

_INTO_MODULE = "put what holds it into the module, and compute the loss there, in a trainingStep of TorchEstimator"


def check_parameters(total: torch.Tensor, module: nn.Module, what: str, param: str) -> None:
    """Refuses a loss that depends on parameters which the module lacks: the optimizer would not get them.

    `total` is a loss with its autograd graph. Messages name `what` has computed the loss, and its Param.
    """
    ids_in_module = {id(parameter) for parameter in module.parameters()}
    nodes = [total.grad_fn]
    visited = set[object]()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        nodes += [following for following, _ in node.next_functions]
        parameter = getattr(node, "variable", None)  # The node of a leaf tensor has the tensor.
        if isinstance(parameter, nn.Parameter) and id(parameter) not in ids_in_module:
            raise ModuleError(
                f"{what} uses a parameter of shape {tuple(parameter.shape)} that is none of the module's, so it would "
                "be neither trained nor saved",
                hint=f"{_INTO_MODULE}; layers in a list of the module belong into an nn.ModuleList; what is not to be "
                "trained is frozen by requires_grad_(False)",
                param=param,
                code="ST-LOSS",
            )


@contextmanager
def unchanged_buffers(loss: Loss | TrainingStep, what: str, param: str, *, values: bool) -> Iterator[None]:
    """Context in which a loss must not change its buffers, because checkpoints do not hold them.

    A loss may make new buffers, which are caches. Without `values`, nothing is compared: the buffers have no values.
    """
    before = {name: buffer.detach().cpu().clone() for name, buffer in loss.buffers().items()} if values else {}
    yield
    after = loss.buffers()  # A loss moves to the device of the output.
    if not all(name in after and _equal(buffer, after[name].detach().cpu()) for name, buffer in before.items()):
        raise ModuleError(
            f"{what} updates a buffer of its own, which no checkpoint and no model would have",
            hint=_INTO_MODULE,
            param=param,
            code="ST-LOSS",
        )


def _equal(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Returns whether two tensors have the same shape and values; NaN equals NaN."""
    return before.shape == after.shape and bool(((before == after) | (before.isnan() & after.isnan())).all())
