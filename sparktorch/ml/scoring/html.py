"""Estimators, models and summaries as text and HTML, which notebooks show."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Params

from sparktorch.base.redact import display_text
from sparktorch.errors import ConfigError
from sparktorch.ml.scoring.figures import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Shown", "block", "drawn", "grid", "number", "pairs", "settings", "sizes"]

_LONGEST = 100  # A value is cut to so many characters.
# Notebooks style tables themselves, in light and dark. These styles keep tables narrow, and text to the left.
_TABLE = "border-collapse: collapse; margin: 0.3em 0"
_CELL = "text-align: left; vertical-align: top; padding: 0.15em 0.8em 0.15em 0"


class Shown(Params):
    """Base class of estimators, which show the Params that are set."""

    def __repr__(self) -> str:
        """Returns the class and the Params that are set, like a call of the constructor; `uid` has the identifier."""
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in settings(self).items())})"

    def _repr_html_(self) -> str:
        return block(type(self).__name__, self.uid, pairs(settings(self)))


def settings(params: Params) -> dict[str, str]:
    """Returns the Params that are set as text: functions and modules by name, `***` for secrets."""
    texts = {param.name: display_text(value, param.name) for param, value in params._paramMap.items()}
    return {name: text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…" for name, text in texts.items()}


def sizes(model: Any) -> dict[str, int]:
    """Returns the number of a model's classes, and of its input values, as far as the model has and knows them."""
    counts = {name: getattr(model, name, -1) for name in ("numClasses", "numFeatures")}
    return {name: count for name, count in counts.items() if count >= 0}


def number(value: Any) -> str:
    """Returns a number with the digits that a table has room for; other values as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def block(title: str, about: str, *parts: str) -> str:
    """Returns parts of HTML under a title."""
    return f"<div><strong>{escape(title)}</strong> <small>{escape(about)}</small>{''.join(parts)}</div>"


def pairs(values: Mapping[str, str]) -> str:
    """Returns a table of names and values; "" if there are none."""
    rows = "".join(
        f'<tr><td style="{_CELL}">{escape(name)}</td><td style="{_CELL}"><code>{escape(value)}</code></td></tr>'
        for name, value in values.items()
    )
    return f'<table style="{_TABLE}"><tbody>{rows}</tbody></table>' if rows else ""


def grid(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Returns a table with a row for each record; a record may lack columns."""
    head = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in columns)
    rows = ""
    for record in records:
        cells = "".join(f'<td style="{_CELL}">{escape(number(record.get(name, "")))}</td>' for name in columns)
        rows += f"<tr>{cells}</tr>"
    return f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def drawn(draw: Callable[[], Figure]) -> str:
    """Returns a figure as an image; "" if matplotlib is not installed."""
    try:
        content = base64.b64encode(picture(draw())).decode()
    except ConfigError:
        return ""
    return f'<div><img alt="" style="max-width: 100%" src="data:image/png;base64,{content}"></div>'
