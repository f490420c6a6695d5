"""What must be installed where a saved model is served, and what is saved with it instead."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sparktorch
from sparktorch.errors import SparkTorchError
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.huggingface.preprocess import FromFolder

__all__ = ["is_installed", "module_of", "requirements"]

_SCORING = ("numpy", "pandas", "pyarrow", "safetensors", "torch")


def requirements(models: Iterable[TrainedModule], *others: str) -> list[str]:
    """Returns the pinned requirements of scoring with models, without pyspark. MLflow adds itself.

    Those are the libraries of every model, those that the classes of the modules' parts, and `preprocess`, are of, and
    those of the packages `others`.
    """
    packages = set(others).union(*map(_packages, models))
    names = [*_SCORING, *sorted({*_distributions(packages)} - {*_SCORING})]
    pinned = [f"{name}=={version(name).partition('+')[0]}" for name in names]
    return [f"sparktorch-estimator=={sparktorch.__version__}", *pinned]


def _packages(trained: TrainedModule) -> set[str]:
    """Returns the names of the packages that a model's code is in, installed or not."""
    modules = [module_of(source) for source in (trained.source, trained.preprocess) if source is not None]
    with suppress(SparkTorchError):  # the weights need not be here
        modules += [kind.__module__ for part in trained.parts() for kind in type(part).__mro__]
    if isinstance(trained.preprocess, FromFolder):
        modules += trained.preprocess.libraries
    if any(spec.layout == "image" for spec in trained.inputs):
        modules.append("PIL")
    return {module.partition(".")[0] for module in modules}


def _distributions(packages: Iterable[str]) -> Iterator[str]:
    """Yields the libraries that packages are installed by; a namespace may be of many, and is left out."""
    known = packages_distributions()
    for package in packages:
        with suppress(ValueError):  # of what was run, and not imported
            found = find_spec(package)
            if found is not None and found.origin and is_installed(Path(found.origin)):
                yield from known.get(package, ())


def module_of(source: Any) -> str:
    """Returns the name of the module that an object, or its class, is in; `source` may be an import path."""
    if isinstance(source, str):
        return source.partition(":")[0]
    found: str = getattr(source, "__module__", "__main__")
    return found


def is_installed(place: Path) -> bool:
    """Whether the requirements cover the code there: an installed library, the standard library, or sparktorch."""
    place = place.resolve()
    own = [*map(sysconfig.get_path, ("stdlib", "platstdlib")), str(Path(sparktorch.__file__).parent)]
    if any(place.is_relative_to(Path(folder).resolve()) for folder in own):
        return True
    return not {"site-packages", "dist-packages"}.isdisjoint(place.parts)
