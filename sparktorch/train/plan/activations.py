"""What autograd keeps of a forward pass, by the parts of a module."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.train.loop.engine import Engine
from sparktorch.train.tensor_parallel.styles import DIVIDED

__all__ = ["Activations"]


class Activations:
    """Records what autograd keeps of a batch.

    `found` has bytes: all of them as "". `NAME:in` and `NAME:out` are those of a part's inputs and output,
    `NAME:within` what is kept while it computes, but for its inputs, and `NAME:more` those of its inputs that are not
    kept. `NAME:begun` is what a linear layer or attention begins: within attention, and from the output of a linear
    layer on until the next one.
    """

    def __init__(self, engine: Engine, batch: Batch) -> None:
        self.found: Counter[str] = Counter({"": 0})
        module = engine.unwrapped
        self._seen = {_storage(tensor) for tensor in [*module.parameters(), *module.buffers(), *batch.tensors]}
        self._open: list[tuple[str, dict[int | None, int]]] = []  # parts that compute now, and their inputs
        self._begun = ""
        self._tensors: list[torch.Tensor] = []  # no other storage gets the address of one
        hooks = []
        for name, part in module.named_modules():
            hooks.append(part.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            hooks.append(part.register_forward_hook(partial(self._leave, name)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                engine.losses_of(engine.module, batch)
        finally:
            for hook in hooks:
                hook.remove()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage is not None and storage not in self._seen:
            self._seen.add(storage)
            self._tensors.append(tensor)
            names = {f"{name}:within" for name, inputs in self._open if storage not in inputs}
            attention = next((name for name, inputs in self._open if name == self._begun and storage in inputs), None)
            for name in {"", *names, *([f"{self._begun}:begun"] if attention is None else [])}:
                self.found[name] += tensor.untyped_storage().nbytes()
        return tensor

    def _enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        given = {id(t): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}.values()
        self.found[f"{name}:in"] += sum(tensor.nbytes for tensor in given if tensor.requires_grad)
        self._open.append((name, {_storage(tensor): tensor.nbytes for tensor in given if tensor.requires_grad}))
        if isinstance(part, nn.MultiheadAttention):
            self._begun = name

    def _leave(self, name: str, part: nn.Module, args: Any, output: Any) -> None:
        _, inputs = self._open.pop()
        if self.found[f"{name}:within"]:  # it would keep its inputs if it computed this again
            self.found[f"{name}:more"] += sum(size for storage, size in inputs.items() if storage not in self._seen)
        if isinstance(part, DIVIDED):
            attention = isinstance(part, nn.MultiheadAttention)
            self._begun = "" if attention else name
            returned = output[:1] if attention else pytree.tree_leaves(output)
            self.found[f"{name}:out"] += sum(each.nbytes for each in returned if isinstance(each, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int | None:
    """Returns the address of a tensor's storage; `None` if it has not one."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
