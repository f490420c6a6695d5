"""The job files in conf/ are valid, and each learns more than the mean of its labels."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparktorch.errors import ConfigError
from sparktorch.job import read_job

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def jobs_on_the_path(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "jobs"))
    spark.sparkContext.addPyFile(str(ROOT / "jobs" / "models.py"))  # as --py-files does


def test_the_digits_job_is_valid() -> None:
    job = read_job(ROOT / "conf" / "digits.yaml")
    assert job.estimator.build().getNumWorkers() == 2
    assert job.tracking.uri == "sqlite:///out/mlflow.db"


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
    _, again = job.data.split(data.repartition(7).orderBy("label"))
    assert training.count() + held_out.count() == 1797
    assert 280 < held_out.count() < 440
    assert again.exceptAll(held_out).count() == 0


def test_a_mistyped_key_is_refused_by_name(tmp_path: Path) -> None:
    text = (ROOT / "conf" / "digits.yaml").read_text()
    file = tmp_path / "job.yaml"
    file.write_text(text.replace("batchSize:", "batchsize:"))
    with pytest.raises(ConfigError, match=r"unknown key estimator\.params\.batchsize(.|\n)*'batchSize'"):
        read_job(file)
