"""What is asked of who changes this repository: each test fails where a piece of a new part is missing."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import indent
from typing import Any, get_args

import pytest

from sparktorch import errors
from sparktorch.base.config import CheckpointConfig, StorageConfig, TrainConfig
from sparktorch.cli import main
from sparktorch.data.columns import Layout
from sparktorch.data.fields.base import Field
from sparktorch.data.fields.kinds import KINDS as COLUMN_KINDS
from sparktorch.distributed.monitor import Timeouts
from sparktorch.errors import SparkTorchError
from sparktorch.ml.fit.translate import Request
from sparktorch.ml.params.classes import CLASSIFIER, GENERIC
from sparktorch.spark.checks import doctor, preflight
from sparktorch.spark.frame.kinds import ENCODINGS
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import STRATEGIES
from tests.device.kinds import KINDS
from tests.support.programs import ROOT, environment

PARAMS = {spec.name: spec for spec in (*GENERIC, *CLASSIFIER)}
# What `translate` computes, by configuration.
COMPUTED: dict[type, set[str]] = {
    TrainConfig: {"validates_untrained", "task", "shuffle_block", "class_weights", "model_folder", "unused_parameters"},
    Recipe: {"module", "module_params", "initial", "seed", "loss"},
    Launch: {"world_size", "profile", "patience", "log_level", "tag", "asks_to_pause"},
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


def test_the_params_of_a_task_are_on_the_page_of_params() -> None:
    import sparktorch

    page = text_of("docs/params.md")
    kinds = [
        kind for name, home in sparktorch._HOMES.items() if ".tasks." in home for kind in [getattr(sparktorch, name)]
    ]
    missing = {spec.name for kind in kinds for spec in kind._table if f"| `{spec.name}` |" not in page}
    assert not missing, "its table is missing in SECTIONS of the task's params.py"


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


PAGE = (ROOT / "docs" / "errors.md").read_text()
SECTIONS = dict(re.findall(r"^### (ST-[A-Z-]+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
BY_CLASS = {
    name: kind.code
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, SparkTorchError)
}


def calls_of_the_package() -> Iterator[tuple[str, ast.Call]]:
    """Yields the calls_of_the_package of the package, with the name of what is called."""
    for path in (ROOT / "sparktorch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield getattr(node.func, "id", getattr(node.func, "attr", "")), node


def literal(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def pattern(node: ast.expr) -> str | None:
    """Returns a regular expression of what a text may be, `None` where it is not written in the call."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            ".+" if isinstance(part, ast.FormattedValue) else re.escape(str(literal(part))) for part in node.values
        )
    text = literal(node)
    return None if text is None else re.sub(r"\\\{.*?\\\}", ".+", re.escape(text))


def texts() -> dict[str, list[str]]:
    """Returns the regular expressions of what errors say, by code."""
    found = defaultdict(list)
    for name, call in calls_of_the_package():
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        if name == "finding_for" and len(call.args) > 4 and isinstance(call.args[0], ast.Constant):
            found[f"ST-{call.args[0].value.upper()}"] += [pattern(call.args[2]) or ".*"]
        if name in (*BY_CLASS, "refusing") and call.args:
            node = named.get("code")
            given = literal(node)
            if node is not None and given is None:  # that of another error, or of a check
                continue
            code = given or BY_CLASS.get(name, BY_CLASS["ModuleError"])
            text = pattern(call.args[0]) or ".*"
            found[code].append(f"{text}: .*" if name == "refusing" else text)
    return found


TEXTS = texts()
FROM_TABLES = {f"ST-{switch.name.replace(' ', '-').upper()}" for switch in preflight._SWITCHES}
FROM_TABLES |= {f"ST-{check.upper()}" for _, check, _ in doctor._FAILURES}
CODES = {*TEXTS, *filter(None, BY_CLASS.values()), *FROM_TABLES}


def test_every_code_has_a_section_and_every_section_a_code() -> None:
    assert set(SECTIONS) == CODES


@pytest.mark.parametrize("code", sorted(TEXTS))
def test_a_section_shows_what_the_code_says(code: str) -> None:
    block = re.search(r"```text\n(.*?)\n```", SECTIONS[code], re.DOTALL)
    assert block
    shown = [re.sub(r" \[[a-z]+=.*\]$", "", line) for line in block[1].split("\n")]
    assert any(re.fullmatch(text, line) for text in TEXTS[code] for line in shown)


LINES: Any = runpy.run_path(str(ROOT / "scripts" / "check_tests.py"))["counts_of_nothing"]


@pytest.mark.parametrize(
    "source",
    [
        "assert model.transform(frame).count() == 1",
        "scored = model.transform(frame).select('label')\nassert scored.limit(3).count() == 3",
        "scored: DataFrame = model.transform(frame)\nassert scored.count() == 1",
        "assert frame.union(model.transform(frame)).count() == 2",
        "assert model.transform(frame).agg(F.count('*')).first()[0] == 1",
        "assert model.transform(frame).groupBy('label').count().collect()",
    ],
)
@pytest.mark.parametrize("scope", ["", "def test_it(model, frame):\n"])
def test_a_count_of_what_is_never_scored_is_found(source: str, scope: str) -> None:
    found = LINES(ast.parse(scope + indent(source, "    ") if scope else source))
    assert len(found) == 1


@pytest.mark.parametrize(
    "source",
    [
        "assert frame.count() == len(model.transform(frame).collect())",
        "rows = model.transform(frame).collect()\nassert frame.limit(len(rows)).count() == 1",
        "rows = model.transform(frame).toPandas()\nassert rows.count() == 1",
        "assert frame.select(F.transform('x', lambda x: x)).count() == 1",
        "plan = model.transform(frame)._jdf.toString()\nassert plan.count('Project') == 1",
        "assert model.transform(frame).agg(F.sum('prediction')).first()[0] == 1",
    ],
)
def test_what_scores_or_was_never_to_be_scored_is_let_through(source: str) -> None:
    assert LINES(ast.parse(source)) == []


SKIPPING = """
import pytest

def test_that_skips():
    pytest.skip("wants root")

@pytest.mark.skipif(True, reason="marked")
def test_that_is_marked(): ...

@pytest.mark.xfail(strict=True)
def test_that_is_known_to_fail():
    assert False
"""

SKIPS_ITSELF = 'import pytest; pytest.importorskip("no_such_module")'


def test_in_ci_a_skip_is_a_failure_unless_it_is_listed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.support import skips\n"
        "from tests.support.skips import pytest_make_collect_report, pytest_runtest_makereport\n"
        "skips.MAY_SKIP['test_listed.py'] = 'for this test'\n"
    )
    for name, text in {"one": SKIPPING, "listed": SKIPPING, "whole": SKIPS_ITSELF}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "."]
    where = environment(CI="true", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True)
    assert "1 failed, 2 skipped, 2 xfailed, 2 errors" in done.stdout
    assert "wants root\nIn CI a skip is a failure, unless" in done.stdout
