"""What CONTRIBUTING.md asks of who adds something: each test fails where a piece is missing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest

from sparktorch.base.config import CheckpointConfig, StorageConfig, TrainConfig
from sparktorch.cli import main
from sparktorch.data.columns import Layout
from sparktorch.data.fields.base import Field
from sparktorch.data.fields.kinds import KINDS as COLUMN_KINDS
from sparktorch.distributed.monitor import Timeouts
from sparktorch.ml.fit.translate import Request
from sparktorch.ml.params.classes import CLASSIFIER, GENERIC
from sparktorch.spark.frame.kinds import ENCODINGS
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import STRATEGIES
from tests.device.kinds import KINDS
from tests.support.programs import ROOT

PARAMS = {spec.name: spec for spec in (*GENERIC, *CLASSIFIER)}
# What `translate` computes, by configuration.
COMPUTED: dict[type, set[str]] = {
    TrainConfig: {"validates_untrained", "task", "shuffle_block", "class_weights", "model_folder", "unused_parameters"},
    Recipe: {"module", "module_params", "initial", "seed", "loss"},
    Launch: {"world_size", "profile", "patience", "log_level", "tag", "pauses"},
    Timeouts: set(),
    StorageConfig: set(),
    CheckpointConfig: {"owner", "restart", "job"},
    Request: {"job", "launch", "columns", "folds", "workers"},
}
NAMES = {
    "config": TrainConfig,
    "recipe": Recipe,
    "launch": Launch,
    "patience": Timeouts,
    "storage": StorageConfig,
    "checkpoint": CheckpointConfig,
    "request": Request,
}


def text_of(*paths: str) -> str:
    found: Iterable[Path] = (file for path in paths for file in sorted(ROOT.glob(path)))
    return "\n".join(file.read_text() for file in found)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_documented_and_in_the_suites(name: str) -> None:
    page = text_of("docs/strategies.md", "docs/model_parallel.md")
    assert f'| `"{name}"` |' in page
    assert f"'{name}'" in PARAMS["strategy"].doc
    for option in dataclasses.fields(STRATEGIES[name].options):
        assert f"`{option.name}" in page, option.name
        docs = [kind.__doc__ or "" for kind in STRATEGIES[name].options.__mro__]
        assert any(f"{option.name}:" in doc for doc in docs), option.name
    assert f'"{name}"' in text_of("tests/dist/strategies/*.py")
    if STRATEGIES[name].resumable:
        assert f'"strategy": "{name}"' in text_of("tests/dist/checkpoint/test_resume.py")


@pytest.mark.parametrize("name", list(NAMES))
def test_every_field_of_a_configuration_comes_from_one_param(name: str) -> None:
    from_params = [spec.field.partition(".")[2] for spec in PARAMS.values() if spec.field.startswith(f"{name}.")]
    assert len(set(from_params)) == len(from_params)
    fields = {field.name for field in dataclasses.fields(NAMES[name])}  # type: ignore[arg-type]
    assert set(from_params) | COMPUTED[NAMES[name]] == fields
    assert not set(from_params) & COMPUTED[NAMES[name]]


@pytest.mark.parametrize("name", PARAMS)
def test_a_param_is_read_somewhere(name: str) -> None:
    spec = PARAMS[name]
    used = text_of("sparktorch/ml/**/*.py", "sparktorch/tracking/*.py")
    used = re.sub(r'P\("\w+"', "", used)  # but for the tables
    assert not spec.field or spec.field.partition(".")[0] in NAMES
    assert f"| `{name}` |" in text_of("docs/params.md"), "its table is missing in SUBJECTS of scripts/params.py"
    assert spec.field or re.search(rf'"{name}"|\.get{spec.accessor}\(|self\.{name}\b', used)


@pytest.mark.parametrize("layout", get_args(Layout))
def test_a_layout_of_columns_is_kept_documented_and_tried(layout: str) -> None:
    assert layout in {name for encoding in ENCODINGS for name in encoding.layouts}
    assert f'"{layout}"' in text_of("docs/data.md") or layout == "dense"
    assert f"'{layout}'" in PARAMS["inputLayouts"].doc
    if layout != "raw":  # the same field as "dense"
        assert layout in {spec.layout for kind in KINDS.values() for spec in kind.specs}
    assert f'"{layout}"' in text_of("tests/spark/frame/*.py") or layout == "dense"


def test_every_kind_of_column_and_every_field_is_tried_on_a_device() -> None:
    tried = {spec.kind for kind in KINDS.values() for spec in kind.specs}
    assert tried == set(COLUMN_KINDS)
    assert {encoding.kind for encoding in ENCODINGS} == set(COLUMN_KINDS) - {"any"}  # which is of every type
    fields = {kind.__name__ for kind in Field.__subclasses__()}
    kinds = text_of("sparktorch/data/fields/kinds.py")
    assert not [name for name in fields if not re.search(rf"return .*\b{name}\(", kinds)]


@pytest.mark.parametrize("name", main.COMMANDS)
def test_a_command_has_what_main_asks_for_and_a_description(name: str) -> None:
    command = main.COMMANDS[name]
    assert command.HELP
    assert command.__doc__
    assert callable(command.add_arguments)
    assert callable(command.run)


def test_every_public_estimator_has_a_model_that_is_documented() -> None:
    import sparktorch

    pages = text_of("README.md", "docs/*.md")
    for name in sparktorch.__all__:
        assert name in pages or name.startswith("__"), name
