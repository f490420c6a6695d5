"""The command line reads its arguments, and prints what a person or a program can read."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pyspark
import pytest
from mlflow.exceptions import MlflowException
from pyspark.errors import AnalysisException, IllegalArgumentException, PySparkException

from sparktorch.cli.doctor import print_table
from sparktorch.cli.main import main
from sparktorch.errors import ConfigError, RankLostError
from sparktorch.spark.checks.findings import Finding
from sparktorch.train.plan.table import Need, Plan
from tests.support.proxy import free_port


def test_a_table_shows_what_where_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    fine = Finding(check="slots", status="ok", found="4, of which 2 are needed")
    fatal = Finding(
        check="checkpoint-dir",
        status="failure",
        found="OSError: [Errno 30] Read-only file system",
        where={"host": "a", "executor": "a:1", "rank": 3},
        setting="checkpointDir",
        value="another one",
    )
    print_table([fine, fatal], "a title")
    text = capsys.readouterr().out
    assert "a title" in text
    assert "4, of which 2 are needed" in text
    assert "[Errno 30]" in text, "brackets are no markup"
    assert "rank 3 on a:1" in text
    assert "set checkpointDir=another one" in " ".join(text.split())
    assert text.rstrip().endswith("A fit would fail.")


def test_the_same_finding_in_many_places_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    many = [
        Finding(check="packages", status="warning", found="torch is old", where={"executor": f"h{number}:1"})
        for number in range(9)
    ]
    print_table(many, "a title")
    text = capsys.readouterr().out
    assert text.count("torch is old") == 1
    assert "h0:1" in text
    assert "and 6 more" in text
    assert "h5:1" not in text
    assert text.rstrip().endswith("see the warnings.")


def test_a_server_that_is_not_there_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sc://127.0.0.1:{free_port()}"
    assert main(["doctor", "--remote", url, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["master"]) == ("failure", url)
    (found,) = report["findings"]
    assert (found["check"], found["setting"]) == ("session", "spark.remote")
    assert "Connection refused" in found["found"]
    assert main(["doctor", "--remote", url]) == 1
    shown = capsys.readouterr().out
    assert f"Spark {pyspark.__version__}, {url}" in shown
    assert "Connection refused" in " ".join(shown.split())


def test_the_command_finds_modules_of_the_working_folder_as_python_m_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["sparktorch", "--version"])
    monkeypatch.setattr("sys.path", ["/env/bin"])
    with pytest.raises(SystemExit):
        main()
    assert sys.path == [str(tmp_path), "/env/bin"]


def test_a_plan_in_which_nothing_fits_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Plan(needs=(Need(strategy="ddp", parameters=605_200),), workers=2, rows=1, parameters=1, memory=10)
    job = Mock()
    job.rows.return_value = (None, None)
    job.estimator.build.side_effect = lambda *, planned: Mock(plan=Mock(return_value=found)) if planned else None
    monkeypatch.setattr("sparktorch.cli.plan.read_job", lambda path: job)
    monkeypatch.setattr("sparktorch.cli.plan.session", lambda *_, **__: nullcontext())
    assert main(["plan", "job.yaml", "--memory", "0.00001"]) == 1
    said = capsys.readouterr()
    assert "605.2 KB" in said.out
    assert "no strategy fits" in said.err


@pytest.mark.parametrize("command", ["plan", "train", "score"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no such key"), 2),
        (AnalysisException("no such column"), 2),
        (IllegalArgumentException("no such option"), 2),
        (RankLostError("gone"), 1),
        (PySparkException("it failed"), 1),
        (MlflowException("no such model"), 1),
    ],
    ids=["setting", "column", "option", "lost rank", "job", "model"],
)
def test_commands_end_with_2_if_what_was_given_cannot_work_and_with_1_if_it_fails(
    command: str,
    error: Exception,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(f"sparktorch.cli.{command}.read_job", Mock(side_effect=error))
    with caplog.at_level(logging.DEBUG, "sparktorch.cli"):
        assert main([command, "job.yaml"]) == status
    assert str(error) in capsys.readouterr().err
    assert "Traceback" in caplog.text


class Py4JJavaError(Exception):
    """An error of Java's as py4j raises it, for which pyspark has no exception of its own."""

    def __init__(self, text: str) -> None:
        super().__init__("a Java traceback")
        self.java_exception = Mock(toString=lambda: text)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("java.io.IOException: Mkdirs failed to create file:/out\n\tat org.apache.hadoop", 1),
        ("org.apache.spark.SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] Failed to find the data source: c", 2),
    ],
)
def test_an_error_of_java_is_told_in_its_first_line(
    text: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparktorch.cli.score.read_job", Mock(side_effect=Py4JJavaError(text)))
    assert main(["score", "job.yaml"]) == status
    assert capsys.readouterr().err == text.partition("\n")[0] + "\n"


def test_a_score_without_rows_is_refused_before_a_session_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("{name: job, data: {path: rows}, estimator: {kind: TabularRegressor}, score: {output: out}}")
    started = Mock()
    monkeypatch.setattr("sparktorch.cli.score.session", started)
    assert main(["score", str(job)]) == 2
    assert "no rows are named to score: data.holdout is 0, and score.data is not set" in capsys.readouterr().err
    started.assert_not_called()


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_job_file_is_refused_before_a_session_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.yaml"
    params = "{module: tests.support.nets:Mlp, optimizer: Adamm}"
    job.write_text(f"{{name: job, data: {{path: rows}}, estimator: {{kind: TorchRegressor, params: {params}}}}}")
    started = Mock()
    monkeypatch.setattr(f"sparktorch.cli.{command}.session", started)
    assert main([command, str(job)]) == 2
    assert "optimizer 'Adamm' is unknown" in capsys.readouterr().err
    started.assert_not_called()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["doctor", "--conf", "spark.speculation"], "--conf: expected KEY=VALUE, got 'spark.speculation'"),
        (["run", "missing.py"], "there is no script 'missing.py' on this machine"),
        (["doctor", "--master", "local", "--remote", "sc://host"], "not allowed with argument"),
    ],
)
def test_arguments_that_cannot_work_end_with_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
