"""The core knows neither Spark nor MLflow, and the package loads what is asked for, without garbage collection."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyspark
import pytest

import sparktorch
from sparktorch.base.imports import uncollected

CORE = [
    "train.loop",
    "data.dataset.reader",
    "data.sampling.plan",
    "worker",
    "model.trained_module",
    "base.config",
    "distributed.server",
]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_core_imports_no_pyspark_and_a_rank_starts_with_torch_numpy_pyarrow_and_safetensors_alone() -> None:
    own = "pandas" if pyspark.__version__ >= "4.1" else "none"  # pyspark 3.5 and 4.0 import pandas themselves
    code = f"BLOCKED = {{{own!r}, 'tqdm', 'rich', 'yaml', 'fsspec', 'mlflow', 'psutil', 'sklearn'}}"
    code += """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""
    code += f"import {', '.join(f'sparktorch.{name}' for name in CORE)}\n"
    code += "print({'pyspark', 'py4j'} & set(sys.modules))\n"
    code += "import sparktorch.spark.launch.rank_task, sparktorch.worker, sparktorch.spark.scoring_udf"
    assert run(code) == "set()"


def test_the_package_alone_imports_next_to_nothing() -> None:
    assert run("import sys, sparktorch; print({'torch', 'pyspark', 'numpy'} & set(sys.modules))") == "set()"


def test_every_public_name_is_there() -> None:
    assert dir(sparktorch) == sorted(sparktorch.__all__)
    for name in sparktorch.__all__:
        assert getattr(sparktorch, name) is not None


def test_a_public_name_is_loaded_from_where_type_checkers_read_it() -> None:
    tree = ast.parse(Path(str(sparktorch.__file__)).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {alias.asname: node.module for node in imports for alias in node.names if alias.asname} == sparktorch._HOMES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'sparktorch' has no attribute 'TorchClasifier'"):
        _ = sparktorch.TorchClasifier


def test_the_namesake_on_pypi_is_refused_beside_this_package(tmp_path: Path) -> None:
    metadata = tmp_path / "sparktorch-0.2.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sparktorch\nVersion: 0.2.0\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import sparktorch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the distribution 'sparktorch' 0.2.0 is installed: an unrelated project" in done.stderr
    assert "pip uninstall -y sparktorch" in done.stderr


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
