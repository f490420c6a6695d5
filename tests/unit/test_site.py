"""The pages of the site name what the package has. `make docs` builds them, and checks their links."""

from __future__ import annotations

import re

import pytest

import sparktorch
from sparktorch import errors, tracking
from tests.support.programs import ROOT

REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
LISTED = {name.rsplit(".")[-1] for name in re.findall(r"\.\. auto\w+:: ([\w.]+)", REFERENCE)}
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("name", [*sparktorch.__all__, *tracking.__all__])
def test_a_public_name_is_in_the_reference(name: str) -> None:
    index = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert name == "__version__" or (name in LISTED and f"`{name}`" in index)


def test_every_exception_is_in_the_reference() -> None:
    raised = {name for name in errors.__all__ if isinstance(getattr(errors, name), type) and name.endswith("Error")}
    assert raised <= LISTED


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_in_the_navigation(page: str) -> None:
    texts = [REFERENCE, *((ROOT / "docs" / f"{each}.md").read_text() for each in PAGES)]
    trees = [tree for text in texts for tree in re.findall(r"```\{toctree\}.*?```", text, re.DOTALL)]
    named = {line.strip().removeprefix("../") for tree in trees for line in tree.splitlines()}
    assert page in {"index", *named}
