"""Imports without garbage collection, and modules by the names of earlier versions."""

from __future__ import annotations

import gc
import importlib
import pickle
from contextlib import suppress

import pytest

from sparktorch.base.imports import import_path, load_object, uncollected
from sparktorch.base.moved import MOVED


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_off_within_and_then_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(ImportError), uncollected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("name", MOVED)
def test_a_module_that_has_moved_is_imported_under_its_new_name(name: str) -> None:
    earlier = importlib.import_module(name)
    for current in MOVED[name]:
        assert current not in MOVED
        assert all(hasattr(earlier, each) for each in getattr(importlib.import_module(current), "__all__", ()))


def test_what_earlier_versions_named_or_pickled_is_found_where_it_has_moved_to() -> None:
    old, name = "sparktorch.model.series.neuralforecast", "NeuralForecastNetwork"
    found = load_object(f"{old}:{name}")
    assert import_path(found) == f"sparktorch.adapters.neuralforecast:{name}"
    assert pickle.loads(f"c{old}\n{name}\n.".encode()) is found
