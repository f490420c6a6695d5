"""Models beyond the 2 GiB that a single buffer of the JVM holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.programs import run_python


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_of_more_than_2_gib_is_fitted_saved_loaded_and_scores(tmp_path: Path) -> None:
    out = run_python(tmp_path, "-m", "tests.spark.programs.large", str(tmp_path / "model"), seconds=800)
    result = json.loads(out.splitlines()[-1])
    assert result["bytes"] > 2**31
    assert result["error"] < 0.1
    assert result["same"]
