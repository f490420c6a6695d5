"""The tables of results without settings name the best of the others, and leave out what was not measured so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.without_settings import READERS, quality, summary_table, whole_table

FACTS = {"commit": "abc1234", "date": "2026-11-28"}
BY_TABLE = {"births": {"ours": 0.8, "XGBoost": 1.0, "sklearn": 0.9}, "flights": {"ours": 0.1, "XGBoost": 0.2}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    def write(name: str, **facts: Any) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"benchmark": name, **FACTS, **facts}))

    write("tabular", **quality("ours", dict.fromkeys(BY_TABLE, "RMSE"), BY_TABLE))
    films = {"films": {"ALS": 0.4, "Recommender": 0.3}}
    write("recommend_quality", **quality("Recommender", {"films": "NDCG@10"}, films, more=["films"]))
    write("series", medians={})
    return tmp_path


def test_each_data_set_on_which_nothing_was_chosen_has_a_line_with_the_best_of_the_others(folder: Path) -> None:
    lines = whole_table(folder).splitlines()
    assert lines[2:4] == [
        "| tables | births | RMSE | 0.8 | 0.9 | sklearn | 0.889 |",
        "| recommendations | films | NDCG@10, more is better | 0.3 | 0.4 | ALS | 1.333 |",
    ]
    assert lines[4:] == [
        "",
        "A ratio below 1 says that ours is better. "
        "`tabular` of commit abc1234, 2026-11-28; `recommend_quality` of commit abc1234, 2026-11-28.",
    ]


def test_mails_have_a_line_for_each_number_of_labels(folder: Path) -> None:
    medians = {"200 mails: TextClassifier, error": 0.05, "200 mails: TF-IDF, error": 0.1, "200 mails: TF-IDF, s": 17.0}
    (folder / "texts.json").write_text(json.dumps({"benchmark": "texts", **FACTS, "medians": medians}))
    assert "| texts | 200 mails | share that is wrong | 0.05 | 0.1 | TF-IDF | 0.500 |" in whole_table(folder)


def test_the_summary_counts_where_ours_is_the_best(folder: Path) -> None:
    lines = summary_table(folder).splitlines()
    assert lines[2:4] == [
        "| tables | 1 | 1 | 0.889 | 0.889 | 0.889 |",
        "| recommendations | 1 | 0 | 1.333 | 1.333 | 1.333 |",
    ]


def test_pages_and_the_readme_get_the_tables_between_their_marks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", folder)
    page = "before\n<!-- results: without summary -->\nold\n<!-- end -->\nafter"
    assert tables.written(page) == page.replace("old\n", f"\n{summary_table(folder)}\n")
    assert "| births |" in tables.written("<!-- results: without settings -->\n<!-- end -->")
    assert {"README.md", "results.md"} <= {path.name for path in tables.PAGES}
    (folder / "tabular.json").unlink()
    (folder / "recommend_quality.json").unlink()
    assert "has been run" in tables.written(page)


@pytest.mark.parametrize(
    ("name", "chosen_on", "reported"), [("tabular", "flights", "births"), ("ranking", "films", "tuna")]
)
def test_sets_on_which_settings_were_chosen_are_not_reported(name: str, chosen_on: str, reported: str) -> None:
    sides = {data: {"ours": 0.9, "XGBoost": 0.8} for data in (chosen_on, reported)}
    result = quality("ours", dict.fromkeys(sides, "NDCG@10"), sides)
    assert [row.data for row in READERS[name][1](result)] == [reported]
