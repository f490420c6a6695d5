"""What an executor finds out about itself and what it reaches, asked of this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import sparktorch
from sparktorch.spark.checks import executor_probe as probe
from tests.support.programs import ROOT


def test_who_connects_hears_the_token_until_the_end() -> None:
    before = threading.active_count()
    with probe.greeting("127.0.0.1", "secret") as port:
        for _ in range(3):
            assert probe.failure_to_reach("127.0.0.1", port, "secret") is None
        assert probe.failure_to_reach("127.0.0.1", port, "others") == "something else answers there"
        assert probe.failure_to_reach("127.0.0.2", port, "secret") is not None, "it listens on one address"
    assert "refused" in str(probe.failure_to_reach("127.0.0.1", port, "secret"))
    assert threading.active_count() == before


def test_a_client_that_says_nothing_keeps_nobody_waiting() -> None:
    with probe.greeting("127.0.0.1", "secret") as port, socket.create_connection(("127.0.0.1", port)):
        assert probe.failure_to_reach("127.0.0.1", port, "secret") is None


def test_what_takes_too_long_is_given_up() -> None:
    free = threading.Event()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within"):
        probe.within(0.1, free.wait)
    assert time.monotonic() - started < 5
    free.set()
    assert probe.within(5, lambda: 3) == 3


def test_a_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    urls = (str(tmp_path), f"file://{tmp_path}/not/there/yet")
    trials = [probe.WriteTrial(url, ".trial", rank) for rank, url in enumerate(urls)]
    for trial in trials:
        assert probe.problem(trial.write) is None
    assert sorted(trials[0].ranks()) == [0, 1]
    for trial in trials:
        assert probe.problem(trial.remove) is None
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_written_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    problem = probe.problem(probe.WriteTrial(str(tmp_path / "file" / "checkpoints"), ".trial", 0).write)
    assert "Not a directory" in str(problem)
    assert "nosuch" in str(probe.problem(probe.WriteTrial("nosuch://bucket/c", ".trial", 0).write))


def test_a_zip_and_a_folder_of_the_same_code_have_the_same_digest(tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "sparktorch"
    shutil.copytree(ROOT / "sparktorch", copy, ignore=shutil.ignore_patterns("__pycache__"))
    archive = shutil.make_archive(str(tmp_path / "zipped"), "zip", copy.parent)
    (copy / "errors.py").write_text((copy / "errors.py").read_text() + "\n")
    code = "from sparktorch.spark.checks.executor_probe import digest_of; print(digest_of('sparktorch'))"
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(place)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for place in (archive, copy.parent)
    ]
    assert found[0] == probe.digest_of("sparktorch")
    assert found[1] != found[0]


def test_a_package_that_cannot_be_imported_is_reported() -> None:
    found = probe.packages()
    assert found["sparktorch"]["version"] == sparktorch.__version__
    assert all("version" in package for package in found.values())
    assert "No module named" in probe.package("no_such_package")["error"]
