"""What a forward pass of a module computes and keeps, by its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.train.arguments import Arguments
from sparktorch.train.engine import Engine
from sparktorch.train.flops import flop_counter
from sparktorch.train.huggingface.models import arguments
from sparktorch.train.pipeline.cut import Cut
from sparktorch.train.strategies.sequence_parallel import outermost
from sparktorch.train.strategies.tensor_parallel import DIVIDED

__all__ = ["kept", "kept_around", "of_stages", "operations"]


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
        From forward to backward, as "" what is kept outside the parts, and as "inputs" those of parts; as "again", the
        most that a part computes again, of which parts within it keep their inputs, and one computes again.
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
    whole = around.parts[0]
    return {"": whole.kept - whole.inputs, "inputs": whole.inputs, "again": whole.again}


@dataclass
class _Part:
    """What is kept within a part, or outside of all.

    Attributes:
        given: Its inputs, until they are kept.
        seen: The memory of what is kept.
        kept: Bytes that are kept, but for what parts within it compute again.
        inputs: Of these, the inputs of parts within it.
        again: The most bytes that a part within it computes again.
        most: The most bytes at a time while parts within it do so, the last one first.
    """

    given: list[torch.Tensor]
    seen: set[int | None] = field(default_factory=set)
    kept: int = 0
    inputs: int = 0
    again: int = 0
    most: int = 0


class _Around:
    """What is kept around parts of a module, and within each; hooks tell it which part computes."""

    def __init__(self, seen: set[int | None]) -> None:
        self.parts = [_Part([], seen)]  # that compute now, the outermost first
        self._tensors: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        for depth, part in enumerate(self.parts[1:], 1):  # torch keeps the inputs of parts that keep anything
            for given in part.given:
                self._keep(given, depth - 1, is_input=True)
            part.given = []
        self._keep(tensor, len(self.parts) - 1)
        return tensor

    def enter(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        self.parts.append(
            _Part([each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)])
        )

    def leave(self, part: nn.Module, args: Any, output: Any) -> None:
        done, around = self.parts.pop(), self.parts[-1]
        again = max(done.kept, done.most)
        around.again, around.most = max(around.again, again), max(around.most, around.kept + again)

    def _keep(self, tensor: torch.Tensor, depth: int, *, is_input: bool = False) -> None:
        self._tensors.append(tensor)  # no other storage gets this address
        storage, part = _storage(tensor), self.parts[depth]
        if storage is not None and not any(storage in each.seen for each in self.parts[: depth + 1]):
            part.seen.add(storage)
            part.kept += _nbytes(tensor)
            part.inputs += _nbytes(tensor) if is_input else 0


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


@torch.no_grad()
def of_stages(cut: Cut, module: nn.Module, first: Batch) -> tuple[list[int], int]:
    """Returns the operations of each stage of a pipeline, and the most bytes that one passes on, for a few rows."""
    args, kwargs = arguments(first, module)
    kwargs.pop("labels", None)
    given = Arguments.of(args, kwargs)
    values: Sequence[torch.Tensor] = ()
    work, passed = [], 0
    for number in range(len(cut.starts)):
        stage = cut.stage(number)
        stage.given = given
        passed = max(passed, sum(value.nbytes for value in values))
        with torch.random.fork_rng(devices=[]), flop_counter() as counter:
            values = stage(*values, **{str(place): tensor for place, tensor in enumerate(given.tensors)})
        work.append(counter.get_total_flops())
    return work, passed
