"""The site: `make docs` builds it under out/site. Pages of commands, job files and notebooks are written here."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

ROOT, PAGES = Path(__file__).parents[1], Path(__file__).parent
sys.path.insert(0, str(ROOT))

import sparktorch  # noqa: E402  # of this checkout
from scripts import features, plots  # noqa: E402
from sparktorch.cli import job_file, main  # noqa: E402

project, author = "sparktorch", "the authors of sparktorch"
release = version = sparktorch.__version__
extensions = [
    *("myst_nb", "sphinx_copybutton", "sphinx_design"),
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"),
]
nitpicky = True
_FOREIGN = (  # of Spark's and Python's own text
    *("Transformer", "optional", "pyspark.sql.DataFrame", "pyspark.sql.dataframe.DataFrame"),
    *("collections.abc.Mapping", "collections.abc.Sequence"),
)
nitpick_ignore = [("py:class", name) for name in _FOREIGN]
highlight_language = "none"  # of blocks that name none: diagrams, and what was printed
default_role = "code"  # of what docstrings put between backticks

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are stored with their outputs, by scripts/notebooks.py

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
napoleon_use_rtype = False

html_theme = "pydata_sphinx_theme"
html_title = f"sparktorch {release}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options: dict[str, Any] = {
    "navbar_align": "left",
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "navigation_with_keys": False,
}


def _write(name: str, text: str) -> None:
    """Writes a page, unless it is there: Sphinx reads again what has changed."""
    page = PAGES / name
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def _commands() -> str:
    """Returns the page of the command line."""
    os.environ["COLUMNS"] = "100"
    parts = ["# Command line", f"```text\n{main.parser().format_help()}```"]
    for name in main.COMMANDS:
        with redirect_stdout(StringIO()) as told, suppress(SystemExit):
            main.main([name, "--help"])
        parts += [f"## {name}", f"```text\n{told.getvalue()}```"]
    return "\n\n".join(parts) + "\n"


def _job_files() -> str:
    """Returns the page of the keys of a job file."""
    parts = ["# Job files", inspect.getdoc(job_file) or ""]
    parts += ["`sparktorch train FILE` reads one. Unknown keys are errors."]
    for name in job_file.__all__:
        kind = "class" if inspect.isclass(getattr(job_file, name)) else "function"
        parts.append(f"```{{eval-rst}}\n.. auto{kind}:: {job_file.__name__}.{name}\n```")
    return "\n\n".join(parts) + "\n"


def _cookbook() -> str:
    """Copies the notebooks beside the pages, and returns the page that lists them."""
    folder = PAGES / "cookbook"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns(".*"))
    paths = sorted(folder.glob("*.ipynb"))
    listed = []
    for path in paths:
        title, question = "".join(json.loads(path.read_text())["cells"][0]["source"]).split("\n\n")[:2]
        listed.append(f"- [{title.removeprefix('# ')}](cookbook/{path.name}): {question}")
    tree = "\n".join(["```{toctree}", ":hidden:", "", *(f"cookbook/{path.stem}" for path in paths), "```"])
    about = "Each notebook asks a question, answers it with a figure and a picture, and says what to change."
    return "\n\n".join(["# Cookbook", about, "\n".join(listed), tree]) + "\n"


def _skip(app: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out Params, their getters and setters, and what is Spark's own."""
    return True if re.fullmatch(r"[gs]et[A-Z]\w*", name) and name != "setParams" else None


def _linked(app: Any, name: str, source: list[str]) -> None:
    """Points links to copied files at their copies, puts plots into their places, and gives Params an anchor each."""
    source[0] = source[0].replace("](../notebooks/", "](cookbook/").replace("](../CHANGELOG.md", "](changelog.md")
    source[0] = re.sub(r"```\{plot\} (\w+)\n```", _pictures, source[0])
    if name == "params":
        source[0] = re.sub(r"(?m)^\| (`(\w+)`)", r'| <a id="\2"></a>\1', source[0])


def _pictures(found: re.Match[str]) -> str:
    """Returns a plot for light pages and for dark ones."""
    about = plots.PLOTS[found[1]][0].__doc__
    return "\n\n".join(
        f"```{{image}} plots/{found[1]}-{style}.svg\n:class: only-{style}\n:alt: {about}\n```" for style in plots.STYLES
    )


def _listed(app: Any, error: Exception | None) -> None:
    """Writes llms.txt: the pages by title, with the first sentence of each."""
    lines = [f"# {project}", ""]
    for name in sorted(app.env.found_docs):
        title = app.env.titles[name].astext()
        lines.append(f"- [{title}]({name}.html)")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n")


def setup(app: Any) -> None:
    """Writes the pages that follow from the code."""
    _write("reference/commands.md", _commands())
    _write("reference/job_files.md", _job_files())
    _write("cookbook.md", _cookbook())
    _write("compatibility.md", features.page())
    _write("changelog.md", (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "]("))
    plots.draw(PAGES / "plots")
    app.connect("source-read", _linked)
    app.connect("autodoc-skip-member", _skip)
    app.connect("build-finished", _listed)
