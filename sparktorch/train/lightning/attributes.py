"""A module's own attributes: what a checkpoint holds of them, and how to leave all of them as they were."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from sparktorch.train.lightning.recognise import overrides
from sparktorch.train.lightning.trainer import TrainerView

__all__ = ["Saved", "unchanged"]

_PLAIN = (type(None), bool, int, float, str)
_LISTS, _OTHERS = (list, deque), (dict, defaultdict, OrderedDict, set)
_OF_TORCH = frozenset(vars(nn.Module()))  # parameters, buffers, parts, hooks and the mode


class Saved:
    """What a module adds to a checkpoint besides weights: its hooks for it, and plain attributes that have changed."""

    def __init__(self, module: nn.Module, trainer: TrainerView) -> None:
        """Notes the plain attributes that the module was built with."""
        self._module: Any = module
        self._trainer, self._built = trainer, _plain(module)

    def state_dict(self) -> dict[str, Any]:
        """Returns what `on_save_checkpoint` adds, and the plain attributes that are not as built."""
        checkpoint, built = self._checkpoint(), self._built
        self._module.on_save_checkpoint(checkpoint)
        saved = {name: value for name, value in checkpoint.items() if name not in self._checkpoint()}
        now = _plain(self._module).items()
        return {"saved": saved, "attributes": {n: v for n, v in now if n not in built or built[n] != v}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        vars(self._module).update(state["attributes"])
        if overrides(self._module, "on_load_checkpoint"):
            self._module.on_load_checkpoint(self._checkpoint() | state["saved"])

    def _checkpoint(self) -> dict[str, Any]:
        """Returns the checkpoint that the hooks see: weights are saved elsewhere, each rank its share."""
        return {"epoch": self._trainer.current_epoch, "global_step": self._trainer.global_step, "state_dict": {}}


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context after which modules have their attributes of before, and lists, dicts and sets their items.

    Parameters, buffers, parts, hooks and tensors that are changed in place are left as they are.
    """
    before = [(vars(module), {n: v for n, v in vars(module).items() if n not in _OF_TORCH}) for module in modules]
    held: dict[int, tuple[Any, Any]] = {}
    for _, own in before:
        _hold(list(own.values()), held)
    try:
        yield
    finally:
        for now, own in before:
            for name in now.keys() - own.keys() - _OF_TORCH:
                del now[name]
            now |= own
        for container, items in held.values():
            container.clear()
            (container.extend if type(container) in _LISTS else container.update)(items)


def _hold(values: Iterable[Any], held: dict[int, tuple[Any, Any]]) -> None:
    """Adds the lists, dicts and sets among values, and in each other, with copies of them."""
    for value in values:
        if type(value) in (*_LISTS, *_OTHERS) and id(value) not in held:
            held[id(value)] = value, copy.copy(value)
            _hold(value.values() if isinstance(value, dict) else value, held)


def _plain(module: nn.Module) -> dict[str, Any]:
    """Returns copies of a module's own attributes that are numbers, strings, or lists and dicts of them."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: copy.deepcopy(value) for name, value in own.items() if name != "training" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, dict):
        return all(map(_is_plain, (*value, *value.values()) if type(value) is dict else value))
    return type(value) in _PLAIN
