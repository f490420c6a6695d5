"""Notebooks are stored with what they print and draw, for those who read them on the site or in the repository."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import NOTEBOOKS, RUNNER, assert_it_answers

SHORT = {
    *("elsewhere", "embeddings", "hybrid", "images", "language_model", "lora", "pictures", "recommendations"),
    *("resnet", "series", "streaming", "tables", "text"),
}
LINES = 25


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_with_the_outputs_of_its_code(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.get("outputs_of") == RUNNER["digest"](notebook), "scripts/notebooks.py runs and stores it"
    assert_it_answers(path, notebook)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert "?" in texts[0]
    assert "What to change:" in texts[-1]
    stored = path.read_text()
    assert not [word for word in ("/tmp/", "/home/", "/root/", "/work/") if word in stored]
    lines = [line for cell in RUNNER["code_of"](notebook) for line in cell.source.splitlines() if line.strip()]
    assert path.stem not in SHORT or len(lines) <= LINES
