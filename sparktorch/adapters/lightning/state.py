"""What a LightningModule has in a training besides parameters: `self.trainer`, attributes of its own, and metrics."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sparktorch.adapters.lightning.recognise import overrides
from sparktorch.base.world import World
from sparktorch.errors import refusing
from sparktorch.train.recipe.metrics import quiet, reduce_over_ranks

__all__ = ["ModuleMetrics", "Saved", "TrainerView", "unchanged"]

_KNOWN = (
    "current_epoch, global_step, max_epochs, world_size, global_rank, local_rank, is_global_zero, "
    "num_training_batches, estimated_stepping_batches, accumulate_grad_batches, training, validating, sanity_checking, "
    "optimizers, lr_scheduler_configs, callback_metrics, logged_metrics, should_stop, logger"
)
_PLAIN = (type(None), bool, int, float, str)
_LISTS, _OTHERS = (list, deque), (dict, defaultdict, OrderedDict, set)
_OF_TORCH = frozenset(vars(nn.Module()))  # They hold parameters, buffers, parts, hooks and the mode.


class TrainerView:
    """A view of the training for a LightningModule, with the Trainer's names; only `should_stop` may be set."""

    max_steps = -1
    sanity_checking = testing = predicting = fast_dev_run = barebones = False
    logger = progress_bar_callback = None

    def __init__(self, world: World, *, epochs: int, steps: int, accumulation: int) -> None:
        self.global_rank, self.local_rank, self.world_size = world.rank, world.local_rank, world.world_size
        self.max_epochs, self.accumulate_grad_batches = epochs, accumulation
        self.num_training_batches = steps * accumulation
        self.estimated_stepping_batches = epochs * steps
        self.current_epoch = self.global_step = 0
        self.training, self.validating = True, False
        self.should_stop = False
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.loggers: list[Any] = []

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """The same as `callback_metrics`."""
        return self.callback_metrics

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"self.trainer has no {name!r}: a fit of sparktorch runs without Lightning's Trainer. It has {_KNOWN}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerView:
        return self  # A copy of the module belongs to the same training.


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
    contents: dict[int, tuple[Any, Any]] = {}
    for _, attributes in before:
        _add_contents(list(attributes.values()), contents)
    try:
        yield
    finally:
        for now, attributes in before:
            for name in now.keys() - attributes.keys() - _OF_TORCH:
                del now[name]
            now |= attributes
        for container, items in contents.values():
            container.clear()
            (container.extend if type(container) in _LISTS else container.update)(items)


def _add_contents(values: Iterable[Any], contents: dict[int, tuple[Any, Any]]) -> None:
    """Adds the lists, dicts and sets among values, and in each other, with copies of them."""
    for value in values:
        if type(value) in (*_LISTS, *_OTHERS) and id(value) not in contents:
            contents[id(value)] = value, copy.copy(value)
            _add_contents(value.values() if isinstance(value, dict) else value, contents)


def _plain(module: nn.Module) -> dict[str, Any]:
    """Returns copies of a module's own attributes that are numbers, strings, or lists and dicts of them."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: copy.deepcopy(value) for name, value in public.items() if name != "training" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, dict):
        return all(map(_is_plain, (*value, *value.values()) if type(value) is dict else value))
    return type(value) in _PLAIN


class ModuleMetrics:
    """The metrics in a module, by their paths, and collections of them; none if torchmetrics has not been imported."""

    def __init__(self, module: nn.Module) -> None:
        """Finds the metrics, and lets them reduce their states over ranks of which some may have no rows."""
        torchmetrics = sys.modules.get("torchmetrics")
        kind = getattr(torchmetrics, "Metric", ())
        groups = getattr(torchmetrics, "MetricCollection", ())
        self.collections = [part for part in module.modules() if isinstance(part, groups)]
        self._by_path: dict[str, Any] = {path: part for path, part in module.named_modules() if isinstance(part, kind)}
        for metric in self._by_path.values():
            reduce_over_ranks(metric)

    def path_of(self, value: Any) -> str:
        """Returns the path of a metric in the module; empty if it is none of them."""
        return next((path for path, metric in self._by_path.items() if metric is value), "")

    def to(self, device: torch.device) -> None:
        """Moves the metrics to the device."""
        for metric in self._by_path.values():
            metric.to(device)

    def compute(self, path: str) -> float:
        """Returns a metric's value over the rows of all ranks; a collective."""
        metric = self._by_path[path]
        with quiet():  # A rank without rows has not called update.
            value = metric.compute()
        with refusing(f"metric {path!r} does not give one number", "log its values one by one"):
            return float(value)

    def reset(self, paths: Iterable[str]) -> None:
        """Resets metrics."""
        for path in paths:
            self._by_path[path].reset()

    @contextmanager
    def restored(self, restores: bool) -> Iterator[None]:
        """Context after which the metrics are as before, if it `restores` them."""
        before = self.states() if restores else {}
        yield
        # As in the other ranks, a value that is computed stays so, and one that an update has removed is gone.
        self.put_back({path: (*state[:2], self._by_path[path]._computed) for path, state in before.items()})

    def set_aside(self, paths: Iterable[str]) -> dict[str, Any]:
        """Resets metrics; returns what `put_back` takes."""
        states = self.states()
        aside = {path: states[path] for path in paths}
        self.reset(aside)
        return aside

    def states(self) -> dict[str, Any]:
        """Returns copies of the metrics' states by path, how many updates made them, and what was computed of them."""
        return {path: (m._copy_state_dict(), m._update_count, m._computed) for path, m in self._by_path.items()}

    def put_back(self, states: Mapping[str, Any]) -> None:
        """Restores such states."""
        for path, (values, updates, computed) in states.items():
            metric = self._by_path[path]
            for name, value in values.items():
                is_list = isinstance(value, list)
                setattr(metric, name, [v.to(metric.device) for v in value] if is_list else value.to(metric.device))
            metric._update_count, metric._computed = updates, computed
