"""The job files in conf/ are valid, and each learns more than the mean of its labels."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlflow
import pytest
import yaml
from pyspark.ml.functions import vector_to_array
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparktorch.cli.job_file import DataSection, read_job
from sparktorch.cli.score import score
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
    training, held_out = job.data.split(job.data.load(spark))
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
