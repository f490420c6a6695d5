"""The values of Params by name, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cached_property
from pathlib import PurePath
from typing import Any

from pyspark.ml.param import Params

from sparktorch.base.imports import load_object
from sparktorch.ml.params.declare import ParamSpec
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.recipe.adapter import Adapter, adapter_of
from sparktorch.train.recipe.loss import TrainingStep
from sparktorch.train.strategies.base import Kind
from sparktorch.train.strategies.registry import strategy_for, strategy_type

__all__ = ["Values"]


class Values:
    """Param values by name; `None` if the Param does not exist, or has neither value nor default."""

    def __init__(self, instance: Params) -> None:
        self._instance = instance

    def __getitem__(self, name: str) -> Any:
        instance = self._instance
        return instance.getOrDefault(name) if instance.hasParam(name) and instance.isDefined(name) else None

    def is_set(self, name: str) -> bool:
        """Whether a Param exists and was set by the user."""
        return bool(self._instance.hasParam(name) and self._instance.isSet(name))

    @property
    def specs(self) -> Collection[ParamSpec]:
        """What tables say of the Params, those included that no constructor of the class takes, but one of its base."""
        tables = [vars(kind).get("_table", ()) for kind in reversed(type(self._instance).__mro__)]
        return {spec.name: spec for table in tables for spec in table}.values()

    @property
    def source(self) -> Any:
        """What makes the module; of a fitted model, what made its module."""
        return getattr(getattr(self["module"], "trained", None), "source", self["module"])

    @property
    def trained(self) -> TrainedModule | None:
        """The fitted model to go on from, if `module` is one."""
        trained = getattr(self["module"], "trained", None)
        return trained if isinstance(trained, TrainedModule) else None

    @property
    def adapter(self) -> Adapter:
        """What the module, or that of a fitted model, has beyond torch's conventions."""
        return adapter_of(self.source)

    @property
    def own_loss(self) -> TrainingStep | None:
        """The training step for the loss that the module has itself; `None` if it has none.

        A `ModuleError` says that the import path of the module cannot be imported.
        """
        step = self.adapter.loss_step(self.source)
        if step is None and isinstance(self.source, str) and ":" in self.source:
            load_object(self.source)  # Its error says more than that the loss is not set.
        return step

    @property
    def brings_its_training(self) -> bool:
        """Whether the module brings its loss, optimizer and schedule."""
        return self.adapter.brings_training

    @property
    def file_in_the_way(self) -> str | None:
        """The file that stands where `modelDir` or a folder above it should."""
        folder = PurePath(self["modelDir"])
        return next((str(path) for path in (folder, *folder.parents) if os.path.isfile(path)), None)

    @property
    def strategy(self) -> Kind:
        """The kind of strategy, with what holds for it whatever its options."""
        return strategy_type(self["strategy"])

    @cached_property
    def makes_validation(self) -> bool:
        """Whether the strategy chooses the validation rows."""
        strategy, options = strategy_for(self["strategy"], self["strategyParams"])
        return strategy.makes_validation(options)

    @property
    def validated(self) -> bool:
        """Whether there are validation rows, marked or chosen by the strategy."""
        return self["validationIndicatorCol"] is not None or self.makes_validation

    @property
    def workers(self) -> tuple[int, int]:
        """The fewest and the most workers."""
        workers, least = self["numWorkers"], self["minWorkers"]
        return workers if isinstance(workers, tuple) else (workers if least is None else least, workers)

    @property
    def sharing(self) -> int:
        """Number of workers that share a batch."""
        return 1 if self.strategy.own_batches else self.workers[1]

    @property
    def rows_are_divided_by(self) -> int:
        """Number of models that divide the rows among them: 1 unless each worker trains one on its share alone."""
        return self.workers[1] if self.strategy.own_batches and not self.makes_validation else 1

    @property
    def is_asynchronous(self) -> bool:
        """Whether workers of the strategy take steps without waiting for each other."""
        strategy, options = strategy_for(self["strategy"], self["strategyParams"])
        return strategy.asynchronous(options)

    @property
    def share(self) -> float:
        """Rows of a worker in a batch."""
        return float(self["batchSize"] / self.sharing)

    @property
    def follows_loss(self) -> bool:
        """Whether the schedule looks at the loss of validation rows."""
        scheduler = self["scheduler"]
        if isinstance(scheduler, str) and ":" in scheduler:
            scheduler = load_object(scheduler)
        return bool(getattr(scheduler, "__name__", scheduler) == "ReduceLROnPlateau")
