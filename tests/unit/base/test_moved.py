"""Modules of earlier versions, by whose names saved models and pipelines import what they hold."""

from __future__ import annotations

import importlib
import pickle

import pytest

import sparktorch
from sparktorch.base.imports import is_object, load_object
from sparktorch.base.moved import MOVED
from sparktorch.tasks.images.estimator import ImageClassifier
from sparktorch.tasks.tables.network import TableNetwork
from sparktorch.tasks.tables.preprocess import TableColumns


@pytest.mark.parametrize("name", MOVED)
def test_a_module_is_imported_by_its_earlier_name_and_holds_the_same_objects(name: str) -> None:
    earlier = vars(importlib.import_module(name))
    for home in MOVED[name]:
        current = importlib.import_module(home)
        for public in getattr(current, "__all__", ()):
            assert earlier[public] is getattr(current, public)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sparktorch.ml.tasks.tabular", "TabularClassifier"),
        ("sparktorch.ml.tasks.tabular", "TabularRegressionModel"),
        ("sparktorch.ml.tasks.recommender", "RecommenderModel"),
        ("sparktorch.ml.tasks.ranker", "Ranker"),
        ("sparktorch.ml.tasks.forecasting_model", "ForecastingModel"),
        ("sparktorch.ml.pretrained", "TextClassifier"),
        ("sparktorch.ml.pretrained", "ImageClassificationModel"),
    ],
)
def test_the_classes_of_saved_stages_are_the_public_ones(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is getattr(sparktorch, name)


def test_import_paths_and_pickles_of_earlier_versions_name_the_same_classes() -> None:
    assert load_object("sparktorch.data.tables:TableColumns") is TableColumns
    assert is_object("sparktorch.data.tables:TableNetwork", TableNetwork)
    assert not is_object("sparktorch.data.tables:TableColumns", TableNetwork)
    assert not is_object("only_on_executors:TableNetwork", TableNetwork)  # It is not imported to compare.
    assert load_object("sparktorch.ml.pretrained:ImageClassifier") is ImageClassifier
    assert pickle.loads(b"csparktorch.data.tables\nTableNetwork\n.") is TableNetwork
