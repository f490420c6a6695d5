"""What a forward pass of a module computes and keeps, by its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.train.engine import Engine
from sparktorch.train.flops import flop_counter
from sparktorch.train.strategies.sequence_parallel import outermost
from sparktorch.train.strategies.tensor_parallel import DIVIDED

__all__ = ["kept", "kept_around", "operations"]


def operations(engine: Engine, batch: Batch) -> Counter[str]:
    """Returns the floating-point operations of a row's forward pass: all as "", and those of each divisible layer."""
    found: Counter[str] = Counter()
    hooks = []
    with flop_counter() as counter, torch.no_grad():
        for name, part in engine.unwrapped.named_modules():
            if isinstance(part, DIVIDED):

                def before(part: nn.Module, inputs: Any, name: str = name) -> None:
                    found[name] -= counter.get_total_flops()

                def after(part: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                    found[name] += counter.get_total_flops()

                hooks += [part.register_forward_pre_hook(before), part.register_forward_hook(after)]
        try:
            engine.losses_of(engine.module, batch)
        finally:
            for hook in hooks:
                hook.remove()
    found[""] = counter.get_total_flops()
    return Counter({name: count // batch.rows for name, count in found.items()})


def kept(engine: Engine, batch: Batch) -> dict[str, int]:
    """Returns the bytes that autograd keeps of a batch: all of them as "", and what each divisible layer begins.

    Those of a linear layer are what is kept from its output on until the next layer, those of attention what is kept
    within it, but for its inputs. `NAME:in` and `NAME:out` are the bytes of a layer's input and output. `NAME:within`
    is what is kept within a stack of torch's transformer layers, or a single one, but for what it gets besides its
    first input.
    """
    module = engine.unwrapped
    seen = {_storage(tensor) for tensor in [*module.parameters(), *module.buffers(), *batch.tensors]}
    record = _Record(seen)
    hooks = []
    for name in outermost(module):
        part = module.get_submodule(name)
        hooks.append(part.register_forward_pre_hook(partial(record.enter, name=name), with_kwargs=True))
        hooks.append(part.register_forward_hook(partial(record.leave, name=name)))
    for name, part in module.named_modules():
        if isinstance(part, DIVIDED):
            hooks.append(part.register_forward_pre_hook(partial(record.before, name=name), with_kwargs=True))
            hooks.append(part.register_forward_hook(partial(record.after, name=name)))
    try:
        with torch.autograd.graph.saved_tensors_hooks(record.pack, lambda tensor: tensor):
            engine.losses_of(engine.module, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return record.found


def kept_around(engine: Engine, batch: Batch, units: Iterable[nn.Module]) -> dict[str, int]:
    """Returns the bytes that are kept of a batch if parts compute theirs again backward.

    Returns:
        As "", what is kept from forward to backward: what is outside the parts, and their inputs; as "again", the most
        that a part computes again.
    """
    module = engine.unwrapped
    around = _Around({_storage(tensor) for tensor in [*module.parameters(), *module.buffers(), *batch.tensors]})
    hooks = []
    for unit in units:
        hooks.append(unit.register_forward_pre_hook(around.enter, with_kwargs=True))
        hooks.append(unit.register_forward_hook(around.leave))
    try:
        with torch.autograd.graph.saved_tensors_hooks(around.pack, lambda tensor: tensor):
            engine.losses_of(engine.module, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {"": around.kept, "again": around.most}


class _Around:
    """What is kept around parts of a module, and at most within one."""

    def __init__(self, seen: set[int | None]) -> None:
        self.kept, self.most = 0, 0
        self._seen, self._depth, self._within = seen, 0, 0
        self._here: set[int | None] = set()  # what the part now has kept within
        self._tensors: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage, size = _storage(tensor), _nbytes(tensor)
        self._tensors.append(tensor)  # no other storage gets this address
        if not self._depth:
            self._keep(tensor)
        elif storage is not None and storage not in self._seen | self._here:
            self._here.add(storage)
            self._within += size
        return tensor

    def enter(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._within, self._here = 0, set()
            for each in pytree.tree_leaves((args, kwargs)):
                if isinstance(each, torch.Tensor):
                    self._tensors.append(each)
                    self._keep(each)

    def leave(self, part: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.most = max(self.most, self._within)

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage is not None and storage not in self._seen:
            self._seen.add(storage)
            self.kept += _nbytes(tensor)


class _Record:
    """What is kept of a forward pass, and hooks that tell it which part computes."""

    def __init__(self, seen: set[int | None]) -> None:
        self.found: Counter[str] = Counter({"": 0})
        self._seen = seen
        self._current, self._around = "", ""  # the layer that began what is kept now; the stack or layer around it
        self._inputs, self._besides = set[int | None](), set[int | None]()  # of attention; of stacks, but for the first
        self._tensors: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage is not None and storage not in self._seen:
            self._seen.add(storage)
            self._tensors.append(tensor)  # no other storage gets this address
            begun = "" if storage in self._inputs else self._current
            around = "" if storage in self._besides else self._around
            for name in {"", begun, around}:
                self.found[name] += _nbytes(tensor)
        return tensor

    def before(self, part: nn.Module, args: Any, kwargs: Any, *, name: str) -> None:
        given = {id(each): each for each in _tensors(args, kwargs)}
        self.found[f"{name}:in"] += sum(each.nbytes for each in given.values() if each.requires_grad)
        if isinstance(part, nn.MultiheadAttention):
            self._current = name
            self._inputs.update(map(_storage, given.values()))

    def after(self, part: nn.Module, args: Any, output: Any, *, name: str) -> None:
        attention = isinstance(part, nn.MultiheadAttention)
        self._current = "" if attention else name
        returned = output[:1] if attention else pytree.tree_leaves(output)
        self.found[f"{name}:out"] += sum(each.nbytes for each in returned if isinstance(each, torch.Tensor))

    def enter(self, part: nn.Module, args: Any, kwargs: Any, *, name: str) -> None:
        self._around = f"{name}:within"
        self._besides.update(map(_storage, _tensors(args, kwargs)[1:]))

    def leave(self, part: nn.Module, args: Any, output: torch.Tensor, *, name: str) -> None:
        self._around = ""
        self.found[f"{name}:out"] += output.nbytes


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0


def _storage(tensor: torch.Tensor) -> int | None:
    """Returns the address of a tensor's storage; `None` if it has not one."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
