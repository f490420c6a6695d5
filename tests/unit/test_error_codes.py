"""Codes of errors and the page that explains them: each has the other, and the page shows what the code says."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from sparktorch import errors
from sparktorch.errors import ConfigError, Refusal, SparkTorchError, refuse
from sparktorch.spark.checks import doctor, preflight
from tests.support.programs import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text()
SECTIONS = dict(re.findall(r"^### (ST-[A-Z-]+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
BY_CLASS = {
    name: kind.code
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, SparkTorchError)
}
CLASH = Refusal._field_defaults["code"]


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yields the calls of the package, with the name of what is called."""
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
    for name, call in calls():
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        if name == "finding_for" and len(call.args) > 4 and isinstance(call.args[0], ast.Constant):
            found[f"ST-{call.args[0].value.upper()}"] += [pattern(call.args[2]) or ".*"]
        if name in (*BY_CLASS, "refusing", "Refusal") and call.args:
            row = name == "Refusal"
            node = call.args[4] if row and len(call.args) > 4 else named.get("code")
            given = literal(node)
            if node is not None and given is None:  # that of another error, or of a check
                continue
            code = given or (CLASH if row else BY_CLASS.get(name, BY_CLASS["ModuleError"]))
            text = pattern(call.args[2 if row else 0]) or ".*"
            found[code].append(f"{text}: .*" if name == "refusing" else text)
    return found


TEXTS = texts()
FROM_TABLES = {f"ST-{what.replace(' ', '-').upper()}" for what in preflight._OFF}
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


def test_a_refused_setting_has_the_code_of_its_row() -> None:
    rows = (Refusal("epochs", lambda p: True, "epochs are {p}", code="ST-VALUE"),)
    with pytest.raises(ConfigError, match=re.escape("[ST-VALUE]")):
        refuse(rows, 0)
