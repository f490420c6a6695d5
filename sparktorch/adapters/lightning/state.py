"""What a LightningModule has in a training besides parameters: `self.trainer`, its own attributes, and metrics."""

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
_LISTS = (list, deque)
_OTHERS = (dict, defaultdict, OrderedDict, set)
_OF_TORCH = frozenset(vars(nn.Module()))  # Here, torch keeps parameters, buffers, parts, hooks and the mode.


class TrainerView:
    """A view of the training for a LightningModule, with the Trainer's names; only `should_stop` may be set."""

    max_steps = -1
    sanity_checking = testing = predicting = fast_dev_run = barebones = False
    logger = progress_bar_callback = None

    def __init__(self, world: World, *, epochs: int, steps: int, accumulation: int) -> None:
        self.global_rank = world.rank
        self.local_rank = world.local_rank
        self.world_size = world.world_size
        self.max_epochs = epochs
        self.accumulate_grad_batches = accumulation
        self.num_training_batches = steps * accumulation
        self.estimated_stepping_batches = epochs * steps
        self.current_epoch = self.global_step = 0
        self.training = True
        self.validating = False
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
    """What a module adds to a checkpoint besides weights: what its hooks save, and changed plain attributes."""

    def __init__(self, module: nn.Module, trainer: TrainerView) -> None:
        """Notes the plain attributes that the module was built with."""
        self._module: Any = module
        self._trainer = trainer
        self._built = _plain(module)

    def state_dict(self) -> dict[str, Any]:
        """Returns what `on_save_checkpoint` adds, and the plain attributes that are not as built."""
        checkpoint = self._checkpoint()
        built = self._built
        self._module.on_save_checkpoint(checkpoint)
        saved = {name: value for name, value in checkpoint.items() if name not in self._checkpoint()}
        now = _plain(self._module)
        attributes = {name: value for name, value in now.items() if name not in built or built[name] != value}
        return {"saved": saved, "attributes": attributes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        vars(self._module).update(state["attributes"])
        if overrides(self._module, "on_load_checkpoint"):
            self._module.on_load_checkpoint(self._checkpoint() | state["saved"])

    def _checkpoint(self) -> dict[str, Any]:
        """Returns the checkpoint that the hooks see, without weights, which each rank saves elsewhere."""
        return {"epoch": self._trainer.current_epoch, "global_step": self._trainer.global_step, "state_dict": {}}


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context after which modules have their old attributes again, and lists, dicts and sets their old items.

    Parameters, buffers, parts, hooks and tensors that are changed in place are left as they are.
    """
    before = [(vars(module), {n: v for n, v in vars(module).items() if n not in _OF_TORCH}) for module in modules]
    held: dict[int, tuple[Any, Any]] = {}
    for _, attributes in before:
        _hold(list(attributes.values()), held)
    try:
        yield
    finally:
        for now, attributes in before:
            for name in now.keys() - attributes.keys() - _OF_TORCH:
                del now[name]
            now |= attributes
        for container, items in held.values():
            container.clear()
            (container.extend if type(container) in _LISTS else container.update)(items)


def _hold(values: Iterable[Any], held: dict[int, tuple[Any, Any]]) -> None:
    """Adds the lists, dicts and sets among values, and those inside, each with a copy, to `held`."""
    for value in values:
        if type(value) in (*_LISTS, *_OTHERS) and id(value) not in held:
            held[id(value)] = value, copy.copy(value)
            _hold(value.values() if isinstance(value, dict) else value, held)


def _plain(module: nn.Module) -> dict[str, Any]:
    """Returns copies of a module's public attributes that are numbers, strings, or lists and dicts of such values."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: copy.deepcopy(value) for name, value in public.items() if name != "training" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


class ModuleMetrics:
    """A module's metrics by their paths, and its collections of metrics; none unless torchmetrics was imported."""

    def __init__(self, module: nn.Module) -> None:
        """Finds the metrics, and makes them reduce their states over ranks, some of which may have no rows."""
        torchmetrics = sys.modules.get("torchmetrics")
        kind = getattr(torchmetrics, "Metric", ())
        groups = getattr(torchmetrics, "MetricCollection", ())
        self.collections = [part for part in module.modules() if isinstance(part, groups)]
        self._by_path: dict[str, Any] = {path: part for path, part in module.named_modules() if isinstance(part, kind)}
        for metric in self._by_path.values():
            reduce_over_ranks(metric)

    def path_of(self, value: Any) -> str:
        """Returns the path of a metric in the module; empty if the value is none of the module's metrics."""
        return next((path for path, metric in self._by_path.items() if metric is value), "")

    def to(self, device: torch.device) -> None:
        """Moves the metrics to the device."""
        for metric in self._by_path.values():
            metric.to(device)

    def compute(self, path: str) -> float:
        """Returns a metric's value over the rows of all ranks; a collective."""
        metric = self._by_path[path]
        with quiet():  # torchmetrics would warn in a rank without rows, which has not called `update`.
            value = metric.compute()
        with refusing(f"metric {path!r} does not give one number", "log its values one by one"):
            return float(value)

    def reset(self, paths: Iterable[str]) -> None:
        """Resets metrics."""
        for path in paths:
            self._by_path[path].reset()

    @contextmanager
    def restored(self, restores: bool) -> Iterator[None]:
        """Context after which the metrics are as before, if `restores` is set."""
        before = self.held() if restores else {}
        yield
        # As in the other ranks, a value that was computed stays, and a value that an update has removed is gone.
        self.put_back({path: (*state[:2], self._by_path[path]._computed) for path, state in before.items()})

    def set_aside(self, paths: Iterable[str]) -> dict[str, Any]:
        """Resets metrics; returns their old states, for `put_back`."""
        held = self.held()
        aside = {path: held[path] for path in paths}
        self.reset(aside)
        return aside

    def held(self) -> dict[str, Any]:
        """Returns, for each metric's path, a copy of the state, the number of updates, and the computed value."""
        return {
            path: (metric._copy_state_dict(), metric._update_count, metric._computed)
            for path, metric in self._by_path.items()
        }

    def put_back(self, held: Mapping[str, Any]) -> None:
        """Restores states that `held` or `set_aside` returned."""
        for path, (values, updates, computed) in held.items():
            metric = self._by_path[path]
            for name, value in values.items():
                setattr(metric, name, _on(metric.device, value))
            metric._update_count = updates
            metric._computed = computed


def _on(device: torch.device, value: Any) -> Any:
    return [part.to(device) for part in value] if isinstance(value, list) else value.to(device)
