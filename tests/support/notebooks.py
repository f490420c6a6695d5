"""The notebooks, and what each must have said when it has run."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import nbformat

from tests.support.programs import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUNNER: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))
SAID = {
    "language_model": "bits a byte, on text the fit has not seen: 4.",
    "rdd": "DDP and treeAggregate differ by ",
    "recommendations": "of the airports held out, NDCG at 10 is 0.",
    "series": "MASE 0.",
}


def assert_it_answers(path: Path, notebook: nbformat.NotebookNode) -> None:
    """It has printed the figure that its question asks for, and drawn a picture, without an error."""
    outputs = [output for cell in RUNNER["code_of"](notebook) for output in cell.outputs]
    assert "error" not in {output.output_type for output in outputs}
    printed = "".join(output.get("text", "") for output in outputs)
    assert SAID.get(path.stem, "accuracy on rows the fit has not seen: 0.9") in printed
    assert any("image/png" in output.get("data", {}) for output in outputs)
