"""Runs notebooks, and stores what they print and draw in them: `python scripts/notebooks.py [NOTEBOOK ...]`."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Return the cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook: nbformat.NotebookNode) -> str:
    """Return the digest of all code, which is stored beside the outputs of it."""
    return hashlib.sha256("\n\n".join(cell.source for cell in code_of(notebook)).encode()).hexdigest()[:16]


def run(notebook: nbformat.NotebookNode, folder: str) -> None:
    """Run a notebook in a folder, as in a shell without settings of Spark, and keep what a reader looks at.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SPARK", "PYSPARK", "_PYSPARK"))
    }
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": folder}}).execute(env=environment)
    for cell in code_of(notebook):
        cell.metadata.pop("execution", None)  # It has times, which differ from run to run.
        # Progress bars and the log of Spark go to stderr.
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["outputs_of"] = digest(notebook)


def main(paths: list[str]) -> None:
    """Run the notebooks named, or all."""
    for path in [Path(path) for path in paths] or sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, folder)
        nbformat.write(notebook, path)
        print(path.stem, f"{path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
