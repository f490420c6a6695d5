"""In CI a test that proves nothing does not pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.programs import environment

TESTS = """
import pytest

def test_that_skips():
    pytest.skip("wants root")

@pytest.mark.skipif(True, reason="marked")
def test_that_is_marked(): ...

@pytest.mark.xfail(strict=True)
def test_that_is_known_to_fail():
    assert False
"""

SKIPS_ITSELF = 'import pytest; pytest.importorskip("no_such_module")'


def test_in_ci_a_skip_is_a_failure_unless_it_is_listed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.support import skips\n"
        "from tests.support.skips import pytest_make_collect_report, pytest_runtest_makereport\n"
        "skips.MAY_SKIP['test_listed.py'] = 'for this test'\n"
    )
    for name, text in {"one": TESTS, "listed": TESTS, "whole": SKIPS_ITSELF}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "."]
    where = environment(CI="true", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True)
    assert "1 failed, 2 skipped, 2 xfailed, 2 errors" in done.stdout
    assert "wants root\nIn CI a skip is a failure, unless" in done.stdout
