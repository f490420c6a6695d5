"""The notebooks run from top to bottom, and are stored without output."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.programs import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SAID = {
    "language_model": "bits a byte, on text the fit has not seen: 4.",
    "rdd": "DDP and treeAggregate differ by ",
    "recommendations": "of the airports held out, NDCG at 10 is 0.",
    "series": "MASE 0.",
}
SHORT = {
    *("elsewhere", "embeddings", "hybrid", "images", "language_model", "lora", "pictures", "recommendations"),
    *("resnet", "series", "streaming", "tables", "text"),
}
LINES = 25
# Before a release all run; before a landing what no other ring runs so: a Pipeline with a search, and an own loop.
LANDING = {"own_loop", "quickstart"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem in LANDING else pytest.mark.slow, id=path.stem) for path in NOTEBOOKS],
)
# The kernel's client leaves a socket to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_runs_and_is_stored_without_output(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    lines = [line for cell in code for line in cell.source.splitlines() if line.strip()]
    assert path.stem not in SHORT or len(lines) <= LINES
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK", "PYSPARK", "_PYSPARK"))}
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert SAID.get(path.stem, "accuracy on rows the fit has not seen: 0.9") in printed
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
