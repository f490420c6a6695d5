"""Tables of results without settings, the model of ring all-reduces, and samples that are taken again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import common, tables
from benchmarks.ring import Gradient, Link, all_reduce, buckets
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


def test_a_ring_sends_nearly_twice_the_bytes() -> None:
    assert all_reduce(1e9, 2, Link(1e9)) == pytest.approx(1.0)
    assert all_reduce(1e9, 4, Link(1e9)) == pytest.approx(1.5)
    assert all_reduce(1e9, 10**6, Link(1e9)) == pytest.approx(2.0, abs=1e-5)
    assert all_reduce(0, 5, Link(1e9, latency=1e-3)) == pytest.approx(8e-3)


@pytest.mark.parametrize("cap", [0, 1, 4_000, 4_001, 100_000, 10**9])
def test_buckets_are_those_of_torch(cap: int) -> None:
    sizes = [1000, 3000, 40, 200_000, 4000, 4000, 17, 90_000, 8]
    tensors = [torch.empty(size // 4 + 1) for size in sizes]
    # torch sorts what it returns by the first tensor of a bucket, which here is the order of readiness.
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, [cap])
    gradients = [Gradient(float(i), tensor.nbytes) for i, tensor in enumerate(tensors)]
    assert buckets(gradients, cap) == tuple(
        Gradient(float(indices[-1]), sum(tensors[i].nbytes for i in indices)) for indices in expected
    )


def test_a_sample_whose_process_aborts_at_its_end_is_measured_again_and_counted(tmp_path: Path) -> None:
    aborts = "echo 'terminate called without an active exception' >&2; exit 1"
    script = f"if [ -e {tmp_path}/done ]; then echo measured; else touch {tmp_path}/done; {aborts}; fi"
    before = len(common._repeated)
    assert common.run_process(["sh", "-c", script])[1] == "measured\n"
    assert len(common._repeated) == before + 1
    with pytest.raises(RuntimeError, match="failed with 3"):
        common.run_process(["sh", "-c", "exit 3"])
    assert len(common._repeated) == before + 1
