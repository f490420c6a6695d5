"""Modules by the names that models and estimators saved by earlier versions have for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "earlier_name", "install"]

_ADAPTERS, _TASKS = "sparktorch.adapters", "sparktorch.tasks"
# These names are of versions before 0.1.0 had tasks and adapters as folders.
_EARLIEST: dict[str, tuple[str, ...]] = {
    "sparktorch.artifact": ("sparktorch.model.trained_module",),
    "sparktorch.config": ("sparktorch.base.config",),
    "sparktorch.data.pretrained": (f"{_ADAPTERS}.huggingface.preprocess",),
    "sparktorch.data.ranking.losses": (f"{_TASKS}.ranking.loss",),
    "sparktorch.data.ranking.metrics": (f"{_TASKS}.ranking.loss",),
    "sparktorch.ml.scoring.recommendations": (f"{_TASKS}.ranking.evaluation", f"{_TASKS}.recommender.evaluation"),
    "sparktorch.ml.summary": ("sparktorch.ml.fit.summary",),
    "sparktorch.model.script": ("sparktorch.model.export",),
    "sparktorch.program": ("sparktorch.model.export",),
    "sparktorch.train.dryrun": ("sparktorch.train.recipe.dry_run",),
}
_BEFORE_FOLDERS: dict[str, tuple[str, ...]] = {
    "sparktorch.data.image_network": (f"{_TASKS}.images.network",),
    "sparktorch.data.pairs": (f"{_TASKS}.recommender.network",),
    "sparktorch.data.petastorm": (f"{_ADAPTERS}.petastorm",),
    "sparktorch.data.petastorm.decoder": (f"{_ADAPTERS}.petastorm.decoder",),
    "sparktorch.data.petastorm.unischema": (f"{_ADAPTERS}.petastorm.unischema",),
    "sparktorch.data.ranking": (f"{_TASKS}.ranking.loss",),
    "sparktorch.data.table_layers": (f"{_TASKS}.shared.layers", f"{_TASKS}.tables.layers"),
    "sparktorch.data.tables": (f"{_TASKS}.tables.preprocess", f"{_TASKS}.tables.network"),
    "sparktorch.ml.pretrained": (f"{_TASKS}.texts.estimator", f"{_TASKS}.images.estimator"),
    "sparktorch.ml.scoring.backtest": (f"{_TASKS}.series.evaluation",),
    "sparktorch.ml.scoring.ranking": (f"{_TASKS}.ranking.evaluation", f"{_TASKS}.recommender.evaluation"),
    "sparktorch.ml.tasks": (_TASKS,),
    "sparktorch.ml.tasks.automatic": (f"{_TASKS}.shared.settings",),
    "sparktorch.ml.tasks.automatic_estimator": (f"{_TASKS}.shared.estimator",),
    "sparktorch.ml.tasks.column_statistics": (f"{_TASKS}.shared.column_statistics",),
    "sparktorch.ml.tasks.forecaster": (f"{_TASKS}.series.estimator",),
    "sparktorch.ml.tasks.forecasting_model": (f"{_TASKS}.series.model",),
    "sparktorch.ml.tasks.held_out": (f"{_TASKS}.shared.held_out",),
    "sparktorch.ml.tasks.image_size": (f"{_TASKS}.images.image_size",),
    "sparktorch.ml.tasks.labelled": (f"{_TASKS}.shared.labelled",),
    "sparktorch.ml.tasks.learning": (f"{_TASKS}.shared.estimator",),
    "sparktorch.ml.tasks.ranker": (f"{_TASKS}.ranking.estimator",),
    "sparktorch.ml.tasks.recommender": (f"{_TASKS}.recommender.estimator", f"{_TASKS}.recommender.model"),
    "sparktorch.ml.tasks.season": (f"{_TASKS}.series.season",),
    "sparktorch.ml.tasks.tabular": (f"{_TASKS}.tables.estimator",),
    "sparktorch.model.series": (f"{_TASKS}.series",),
    "sparktorch.model.series.forecasts": (f"{_TASKS}.series.forecasts",),
    "sparktorch.model.series.module": (f"{_TASKS}.series.network",),
    "sparktorch.model.series.neuralforecast": (f"{_ADAPTERS}.neuralforecast",),
    "sparktorch.model.series.seasonal": (f"{_TASKS}.series.seasonal",),
    "sparktorch.model.series.training": (f"{_TASKS}.series.loss",),
    "sparktorch.model.top_k": (f"{_TASKS}.recommender.top_k",),
    "sparktorch.spark.petastorm": (f"{_ADAPTERS}.petastorm.dataframes",),
    "sparktorch.spark.recommend": (f"{_TASKS}.recommender.lists",),
    "sparktorch.train.huggingface": (f"{_ADAPTERS}.huggingface",),
    "sparktorch.train.huggingface.folder": (f"{_ADAPTERS}.huggingface.folder",),
    "sparktorch.train.huggingface.models": (f"{_ADAPTERS}.huggingface.models", f"{_ADAPTERS}.huggingface.loss"),
    "sparktorch.train.huggingface.preprocess": (f"{_ADAPTERS}.huggingface.preprocess",),
    "sparktorch.train.lightning": (f"{_ADAPTERS}.lightning", f"{_ADAPTERS}.lightning.recipe"),
    "sparktorch.train.lightning.optimizers": (f"{_ADAPTERS}.lightning.optimizers",),
    "sparktorch.train.lightning.recipe": (f"{_ADAPTERS}.lightning.recipe",),
    "sparktorch.train.lightning.recognise": (f"{_ADAPTERS}.lightning.recognise",),
    "sparktorch.train.lightning.state": (f"{_ADAPTERS}.lightning.state",),
    "sparktorch.train.lightning.step": (f"{_ADAPTERS}.lightning.step",),
    "sparktorch.train.lightning.training": (f"{_ADAPTERS}.lightning.training",),
    "sparktorch.train.recipe.own_training": ("sparktorch.train.recipe.module_hooks",),
}
MOVED = {**_EARLIEST, **_BEFORE_FOLDERS}
_EARLIER_NAMES = {home: name for name, homes in _BEFORE_FOLDERS.items() for home in homes}


class _Finder(MetaPathFinder, Loader):
    """Imports a module under an earlier name, with the contents of the modules that have taken its place.

    Spark's `Pipeline.load`, pickles and import paths in saved files all import by name, so that none of them needs to
    know this table.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MOVED:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        for name in MOVED[module.__name__]:
            current = vars(importlib.import_module(name))
            vars(module).update({key: value for key, value in current.items() if not key.startswith("__")})


def install() -> None:
    """Lets Python import modules by their earlier names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # It comes first: Python's own finder takes an empty folder that an update has left for a package.
        sys.meta_path.insert(0, _Finder())


def earlier_name(module: str) -> str:
    """Returns the name by which checkpoints identify a module: the name from before it moved, if it has moved."""
    return _EARLIER_NAMES.get(module, module)
