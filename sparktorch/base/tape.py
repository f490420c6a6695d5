"""A record of what is done to fake tensors, from which one of them is made real."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from sparktorch.errors import ModuleError

__all__ = ["NotDrawnError", "Tape", "is_fake"]


@dataclass(frozen=True)
class _Ref:
    """A fake tensor: the number of its storage, and its place in it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Ref:
        place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return cls(_storage(tensor), tensor.dtype, *place, tensor.is_conj(), tensor.is_neg())

    def within(self, storages: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
        """Returns the real tensor, which shares memory with the others of its storage."""
        real: torch.Tensor = torch.empty(0, dtype=self.dtype)
        real = real.set_(storages[self.storage], self.offset, self.size, self.stride)
        real = real.conj() if self.conjugated else real
        return torch._neg_view(real) if self.negated else real


@dataclass(frozen=True)
class _Call:
    """A call of one of torch's operators that has written tensors.

    Attributes:
        operator: The operator.
        arguments: Its positional and keyword arguments, with a `_Ref` for each fake tensor.
        made: A `_Ref` for each new tensor that it returned, `None` for what else it returned.
        reads: The storages of its arguments.
        writes: The storages that it has changed or made.
        dtype: The default dtype.
        generator: The generator of random numbers that it draws, and the state it had; `None` if it draws none.
    """

    operator: Callable[..., Any]
    arguments: tuple[Any, Any]
    made: tuple[_Ref | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    dtype: torch.dtype
    generator: tuple[torch.Generator, torch.Tensor] | None = None

    def again(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Calls the operator on real tensors."""

        def real(value: Any) -> Any:
            if isinstance(value, _Ref):
                return value.within(storages)
            return value.clone() if isinstance(value, torch.Tensor) else value  # what follows may change it

        args, kwargs = tree_map(real, self.arguments)
        if self.generator is not None:
            self.generator[0].set_state(self.generator[1])
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            found, _ = tree_flatten(self.operator(*args, **kwargs))
        finally:
            torch.set_default_dtype(before)
        for ref, value in zip(self.made, found, strict=True):
            if ref is not None:
                assert value.dtype == ref.dtype, (self.operator, value.dtype, ref.dtype)
                storages[ref.storage] = value.untyped_storage()


class NotDrawnError(Exception):
    """A value depends on random numbers that were not drawn."""


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What has been done to fake tensors, in order."""

    def __init__(self, *, draws: bool, others: bool = False) -> None:
        """Begins with no calls.

        Args:
            draws: Whether random numbers are drawn, so that those of later calls are as without this mode.
            others: Whether values may depend on other random numbers than those that would have been drawn.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._others = draws, others
        self._room = torch.empty(0).untyped_storage()
        self._calls: list[_Call] = []
        self._writers: dict[int, list[int]] = {}
        self._storages: list[Any] = []  # the number of a storage is its own as long as it exists

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator, and records it if it has written fake tensors.

        What it does to real tensors alone, as to those of NumPy's arrays, it does at once.
        """
        kwargs = kwargs or {}
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        changed = _written(func, args, kwargs)
        if tensors and not (all(map(is_fake, changed)) and any(map(is_fake, tensors))):
            with unset_fake_temporarily():
                return func(*tree_map(self._value, args), **tree_map(self._value, kwargs))
        if func._schema.name == "aten::set_" and func._overloadname.startswith("source_Storage"):
            raise _from_elsewhere("a tensor")
        written = set(map(id, changed))
        drawn: tuple[torch.Generator, torch.Tensor] | None = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator: torch.Generator = kwargs.get("generator") or torch.default_generator
            state = torch.Generator().manual_seed(len(self._calls)) if self._others else generator
            drawn = generator, state.get_state()
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):  # a number, or as many rows as are true
            with unset_fake_temporarily():
                return func(*tree_map(self._value, args), **tree_map(self._value, kwargs))
        given = list(filter(is_fake, tensors))
        known = {_storage(value) for value in given}
        made = tuple(self._new(value, known) for value in tree_flatten(result)[0])
        writes = {_storage(value) for value in given if id(value) in written} | {ref.storage for ref in made if ref}
        if drawn is not None and self._draws:
            self._draw(func, args, kwargs, written, drawn)
        if writes:
            arguments = tree_map(_held, (args, kwargs))
            self._add(
                _Call(func, arguments, made, frozenset(known), frozenset(writes), torch.get_default_dtype(), drawn)
            )
        return result

    def _new(self, value: Any, known: set[int]) -> _Ref | None:
        if not is_fake(value) or _storage(value) in known:
            return None
        self._storages.append(value.untyped_storage())
        return _Ref.of(value)

    def _draw(
        self, func: Any, args: Any, kwargs: Any, written: set[int], generator: tuple[torch.Generator, torch.Tensor]
    ) -> None:
        """Draws the random numbers of a call, and forgets them."""

        def scratch(value: Any) -> Any:
            return self._scratch(value) if id(value) in written else self._value(value)

        with unset_fake_temporarily():
            real_args, real_kwargs = tree_map(scratch, (args, kwargs))
            generator[0].set_state(generator[1])
            func(*real_args, **real_kwargs)

    def _scratch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns memory for a tensor, the same for all: allocated and freed for each, it would become fragments."""
        ref = _Ref.of(tensor)
        last = sum((size - 1) * stride for size, stride in zip(ref.size, ref.stride, strict=True))
        needed = (last + 1) * tensor.element_size()
        if self._room.nbytes() < needed:
            self._room = torch.empty(needed, dtype=torch.uint8).untyped_storage()
        return replace(ref, offset=0).within({ref.storage: self._room})

    def let_go(self) -> None:
        """Frees the memory into which random numbers were drawn."""
        self._room = torch.empty(0).untyped_storage()

    def _add(self, call: _Call) -> None:
        for storage in call.writes:
            self._writers.setdefault(storage, []).append(len(self._calls))
        self._calls.append(call)

    def _value(self, value: Any) -> Any:
        return self.value(value) if is_fake(value) else value

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what a fake tensor would hold now, in memory of its own, on the CPU."""
        ref, needed = _Ref.of(tensor), self.needed(tensor)
        storages: dict[int, torch.UntypedStorage] = {}
        with unset_fake_temporarily(), torch.random.fork_rng(devices=()):
            for number in sorted(needed):
                self._calls[number].again(storages)
            found = ref.within(storages)
            return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()

    def needed(self, tensor: torch.Tensor, name: str = "a tensor") -> set[int]:
        """Returns the numbers of the calls that a fake tensor's value depends on.

        Raises:
            ModuleError: It depends on a tensor that no call has made.
            NotDrawnError: It depends on random numbers that were not drawn.
        """
        needed, todo = set[int](), [_storage(tensor)]
        while todo:
            storage = todo.pop()
            if storage not in self._writers:
                raise _from_elsewhere(name)
            for number in self._writers[storage]:
                if number not in needed:
                    needed.add(number)
                    todo += self._calls[number].reads
        if not (self._draws or self._others) and any(self._calls[number].generator for number in needed):
            raise NotDrawnError
        return needed


def _from_elsewhere(name: str) -> ModuleError:
    return ModuleError(
        f"the value of {name} comes from outside of the module's constructor, as by torch.load or a cache",
        hint="make it in the constructor, or from NumPy's arrays; or leave modelDir out",
        param="module",
    )


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the tensors that an operator writes in place."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return tree_flatten(found)[0]


def _held(value: Any) -> Any:
    """Returns an argument as it is recorded: a `_Ref` to a fake tensor, a copy of any other."""
    if is_fake(value):
        return _Ref.of(value)
    if isinstance(value, torch.Tensor):
        with unset_fake_temporarily():
            return value.detach().clone()
    return value
