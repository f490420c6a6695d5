"""The job files in conf/ are valid, and each learns more than the mean of its labels."""

from __future__ import annotations

import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import yaml
from pyspark.ml.functions import vector_to_array
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparktorch import RankingModel, TorchClassificationModel, TorchRegressionModel
from sparktorch.cli.job_file import DataSection, read_job
from sparktorch.cli.main import main
from sparktorch.cli.score import evaluated, score
from sparktorch.tracking import log_model
from tests.support.mlflow import QUIET
from tests.support.programs import ROOT

pytestmark = QUIET


@pytest.fixture(autouse=True)
def jobs_on_the_path(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "jobs"))
    spark.sparkContext.addPyFile(str(ROOT / "jobs" / "models.py"))  # as --py-files does


@pytest.mark.landing
@pytest.mark.parametrize("name", ["diabetes", "movielens"])
def test_a_regression_job_beats_the_mean(spark: SparkSession, name: str) -> None:
    job = read_job(ROOT / "conf" / f"{name}.yaml")
    training, held_out = job.rows(spark)
    model = job.estimator.build().setProgress(False).fit(training)
    scored = model.transform(held_out)
    mean = training.agg(F.avg(job.label)).first()[0]
    errors = scored.select(
        F.avg((F.col(job.label) - F.col("prediction")) ** 2), F.avg((F.col(job.label) - mean) ** 2)
    ).first()
    assert errors[0] < 0.85 * errors[1]


def test_the_split_depends_on_contents_alone(spark: SparkSession) -> None:
    job = read_job(ROOT / "conf" / "digits.yaml")
    data = job.data.load(spark)
    training, held_out = job.data.split(data)
    _, again = job.data.split(data.repartition(7).orderBy("label").withColumnRenamed("label", "the.label"))
    assert training.count() + held_out.count() == 1797
    assert 280 < held_out.count() < 440
    assert again.exceptAll(held_out).count() == 0


def test_without_a_share_to_hold_out_columns_may_be_of_any_type(spark: SparkSession) -> None:
    data = spark.range(3).selectExpr("id", "map('a', id) m")
    training, held_out = DataSection(path="rows.parquet", holdout=0).split(data)
    assert (training.count(), held_out.collect()) == (3, [])


@pytest.fixture
def job_file(spark: SparkSession, store: mlflow.MlflowClient, tmp_path: Path) -> Path:
    values = yaml.safe_load((ROOT / "conf" / "diabetes.yaml").read_text())
    values["tracking"] = {"uri": mlflow.get_tracking_uri(), "experiment": "tests", "model": "diabetes"}
    values["score"] = {
        "data": {"format": "json", "path": str(tmp_path / "in"), "schema": "features array<double>, label double"},
        "output": str(tmp_path / "out"),
        "format": "json",
        "options": {"compression": "gzip"},
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(values))
    job = read_job(file)
    estimator = job.estimator.build().copy()._set(epochs=1, progress=False)
    with mlflow.start_run():
        log_model(estimator.fit(job.data.load(spark)), registered_model_name="diabetes")
    return file


def arrive(spark: SparkSession, file: Path, first: int, rows: int) -> None:
    data = read_job(ROOT / "conf" / "diabetes.yaml").data.load(spark)
    some = data.select(vector_to_array("features").alias("features"), "label").offset(first).limit(rows)
    some.coalesce(1).write.mode("append").json(str(file.parent / "in"))


def test_files_of_any_format_are_scored_as_a_whole_or_as_they_arrive(
    spark: SparkSession, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session, job = spark.newSession(), read_job(job_file)  # a stream changes a setting of its session

    arrive(spark, job_file, 0, 30)
    score(session, job, streamed=False)
    printed = capsys.readouterr().out
    assert "scored 30 rows with models:/diabetes/latest" in printed
    assert "held-out rmse" in printed
    shutil.rmtree(job_file.parent / "out")

    score(session, job, streamed=True)
    assert "scored 30 rows" in capsys.readouterr().out
    arrive(spark, job_file, 30, 12)
    score(session, job, streamed=True)
    assert "scored 12 rows" in capsys.readouterr().out
    scored = spark.read.json(str(job_file.parent / "out"))
    assert scored.count() == 42
    assert scored.where("prediction is null").count() == 0


@pytest.fixture
def shared(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands have the session of the tests."""
    for command in ("score", "train"):
        monkeypatch.setattr(f"sparktorch.cli.{command}.session", lambda *_, **__: nullcontext(spark))


def changed(file: Path, **sections: dict[str, Any]) -> str:
    values = yaml.safe_load(file.read_text())
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    other = file.with_name("changed.yaml")
    other.write_text(yaml.safe_dump(values))
    return str(other)


@pytest.mark.usefixtures("shared")
def test_a_score_that_fails_or_has_no_rows_leaves_what_was_there_and_says_why_in_a_sentence(
    spark: SparkSession, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrive(spark, job_file, 0, 30)
    assert main(["score", str(job_file)]) == 0
    capsys.readouterr()
    empty = job_file.parent / "empty"
    spark.createDataFrame([], "features array<double>, label double").write.json(str(empty))
    wrong = job_file.parent / "wrong"
    spark.createDataFrame([([1.0, 2.0], 1.0)], "features array<double>, label double").write.json(str(wrong))
    (job_file.parent / "file").write_text("no folder")
    scores = yaml.safe_load(job_file.read_text())["score"]
    for status, says, sections in (
        (2, "no rows are named to score", {"score": {"data": None}, "data": {"holdout": 0.0}}),
        (2, "there are no rows to score", {"score": {"data": {**scores["data"], "path": str(empty)}}}),
        (1, "values", {"score": {"data": {**scores["data"], "path": str(wrong)}}}),
        (2, "DATA_SOURCE_NOT_FOUND", {"score": {"data": {**scores["data"], "format": "jsn"}}}),
        (2, "DATA_SOURCE_NOT_FOUND", {"score": {"format": "jsn"}}),
        (1, "/file", {"score": {"output": str(job_file.parent / "file" / "out")}}),
    ):
        assert main(["score", changed(job_file, **sections)]) == status, says
        said = capsys.readouterr()
        assert says in said.err
        assert "\tat " not in said.err, "no stack of Java's"
        assert "scored" not in said.out
    assert spark.read.json(str(job_file.parent / "out")).count() == 30


@pytest.mark.usefixtures("shared", "store")
def test_a_table_is_trained_on_and_scored_by_its_job_file_alone(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load((ROOT / "conf" / "wine.yaml").read_text())
    values["tracking"] = {"uri": mlflow.get_tracking_uri(), "experiment": "tests", "model": "wine"}
    values["score"]["output"] = str(tmp_path / "out")
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(values))
    assert main(["train", str(file)]) == 0
    assert "model: models:/wine/1" in capsys.readouterr().out
    assert main(["score", str(file)]) == 0
    (accuracy,) = re.findall(r"held-out accuracy: ([\d.]+)\n", capsys.readouterr().out)
    assert float(accuracy) > 0.85
    scored = spark.read.parquet(str(tmp_path / "out"))
    assert 15 < scored.count() < 60
    assert {"alcohol", "maker", "prediction"} <= {*scored.columns}


def test_groups_are_held_out_as_a_whole(spark: SparkSession) -> None:
    rows = spark.range(400).selectExpr("id % 40 AS Shop", "id AS day", "rand(1) AS sold")
    training, held_out = DataSection(path="rows", holdout=0.3).split(rows, "shop")
    shops = [{row["Shop"] for row in part.select("Shop").distinct().collect()} for part in (training, held_out)]
    assert not shops[0] & shops[1]
    assert len(shops[0] | shops[1]) == 40
    assert 4 < len(shops[1]) < 20


def test_predictions_are_compared_with_the_labels_that_there_are(spark: SparkSession) -> None:
    rows = spark.createDataFrame(
        [([3.0, 0.0], 1.0, "b", [1.0]), ([0.0, 2.0], None, "a", None), ([2.0, 0.0], float("nan"), None, None)],
        "features array<float>, target double, letter string, several array<double>",
    )
    net = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(net.weight)
    classifier = TorchClassificationModel.fromModule(net, rows, labels=["a", "b"])
    scored = classifier.transform(rows)
    assert evaluated(classifier, scored, "LETTER") == (
        3,
        "held-out accuracy: 0.0000, of 2 rows with a label and a prediction",
    )
    said = {label: evaluated(classifier, scored, label)[1] for label in ("nowhere", "several")}
    assert said["nowhere"] == "not evaluated: there is no column 'nowhere'"
    assert "not evaluated: column 'several'" in said["several"]
    first = TorchRegressionModel.fromModule(
        torch.nn.Linear(2, 1, bias=False), rows, weights={"weight": torch.ones(1, 2)}
    )
    scored = first.transform(rows)
    assert evaluated(first, scored, "target")[1] == "held-out rmse: 2.0000, of 1 row with a label and a prediction"
    assert "not evaluated: column 'several'" in evaluated(first, scored, "several")[1]
    unlabelled = scored.where("target is null")
    assert "no row has both a prediction and a label" in evaluated(first, unlabelled, "target")[1]
    both = TorchRegressionModel.fromModule(net, rows)
    assert "not evaluated: column 'prediction' must be a number" in evaluated(both, both.transform(rows), "target")[1]


def test_a_rankers_order_is_compared_in_groups_and_choices_are_not(spark: SparkSession) -> None:
    rows = [(1, [3.0, 0.0], 2.0), (1, [1.0, 0.0], 0.0), (2, [0.0, 1.0], 1.0), (None, [0.0, 2.0], 0.0)]
    frame = spark.createDataFrame(rows, "query int, features array<float>, grade double")
    net = torch.nn.Linear(2, 1, bias=False)
    ranker = RankingModel.fromModule(
        net, frame, weights={"weight": torch.ones(1, 2)}, groupCol="query", labelCol="grade"
    )
    scored = ranker.transform(frame)
    assert evaluated(ranker, scored.where("query is not null"), "grade") == (3, "held-out NDCG at 10: 1.0000")
    assert evaluated(ranker, scored, "grade") == (4, "not evaluated: 1 row is null in column 'query'")
    assert evaluated(ranker, scored, "")[1].startswith("not evaluated: choices are no ratings")
