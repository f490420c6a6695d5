"""A skipped test proves nothing: where `CI` is set it has failed, unless it is on the list here."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

# What a name of a test begins with, what a machine may lack for it, and what is proven there all the same.
MAY_SKIP = {
    "tests/faults/test_bucket_mount.py": "wants /dev/fuse; what such a mount refuses is refused one by one in "
    "tests/dist/checkpoint/test_checkpointer.py",
    "tests/faults/test_network.py": "hosts of one's own want root and network namespaces; stalled, lost and fewer "
    "ranks are proven on one host by tests/faults/test_ranks.py and tests/spark/ml/test_restart.py",
    "tests/faults/test_ranks.py::test_a_rank_that_the_out_of_memory_killer_ended": "wants a memory control group that "
    "may be written",
    "tests/faults/test_larger_than_memory.py": "wants memory control groups that may be written; what ranks hold is "
    "measured by tests/dist/train/test_model_folder.py",
    "tests/unit/model/series/test_neuralforecast.py::test_models": "wants neuralforecast, which brings Ray and is "
    "not installed with the rest; what a model is called with is proven beside it",
    "tests/unit/model/test_formats.py": "wants onnxruntime, which the older stack of Petastorm is set up without",
    "tests/unit/ml/test_discarded_models.py": "wants Optuna, which the older stack of Petastorm is set up without",
    "tests/unit/ml/test_space.py": "wants Optuna, which the older stack of Petastorm is set up without",
    "tests/unit/train/test_huggingface.py": "wants transformers, which the older stack of Petastorm is set up without",
    "tests/unit/train/test_lightning.py": "wants Lightning, which the older stack of Petastorm is set up without",
    "tests/unit/data/test_storage.py": "looks into /proc, which Linux alone has",
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judges tests, and fixtures that skip them."""
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judges files that skip themselves."""
    return _judged((yield))


def _judged(report: Report) -> Report:
    skipped = report.outcome == "skipped" and not hasattr(report, "wasxfail")
    if skipped and os.environ.get("CI", "").lower() == "true" and not report.nodeid.startswith(tuple(MAY_SKIP)):
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"{reason}\nIn CI a skip is a failure, unless tests/support/skips.py lists it."
    return report
