"""A job file is read whole or refused with the key that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

import sparktorch
from sparktorch import TorchClassifier
from sparktorch.cli.job_file import DataSection, EstimatorSection, JobConfig, TrackingSection, read_job
from sparktorch.errors import ConfigError, ModuleError, SparkTorchError
from sparktorch.ml.estimator import TorchEstimatorBase

VALUES: dict[str, Any] = {
    "name": "flowers",
    "data": {"path": "flowers.parquet", "holdout": 0.25},
    "estimator": {"kind": "TorchClassifier", "params": {"module": "tests.support.nets:Mlp", "epochs": 3}},
    "score": {"output": "scored"},
}


def read(values: Any, directory: Path) -> JobConfig:
    path = directory / "job.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return read_job(path)


def with_value(key: str, value: Any) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(VALUES))
    *sections, last = key.split(".")
    place = values
    for section in sections:
        place = place.setdefault(section, {})
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return values


def test_a_job_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    job = read(VALUES, tmp_path)
    assert job.name == "flowers"
    assert job.data == DataSection(path="flowers.parquet", holdout=0.25)
    assert job.tracking == TrackingSection()
    assert (job.scoring.output, job.scoring.model, job.scoring.format) == ("scored", None, "parquet")


def test_only_scoring_needs_to_know_where_scored_rows_go(tmp_path: Path) -> None:
    job = read(with_value("score", ...), tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)missing key score.*output: PATH"):
        _ = job.scoring


def test_the_estimator_is_built_with_its_params(tmp_path: Path) -> None:
    estimator: Any = read(VALUES, tmp_path).estimator.build()
    assert isinstance(estimator, TorchClassifier)
    assert (estimator.getModule(), estimator.getEpochs()) == ("tests.support.nets:Mlp", 3)


@pytest.mark.parametrize(
    ("key", "value", "message", "hint"),
    [
        ("nmae", "x", "unknown key nmae", "did you mean 'name'?"),
        ("score.data", {"path": "in", "pth": 1}, "unknown key score.data.pth", "did you mean 'path'?"),
        ("estimator.params.labelcol", "y", "estimator.params 'labelcol' is unknown", "did you mean 'labelCol'?"),
        ("estimator.kind", "TorchClasifier", "estimator.kind 'TorchClasifier' is unknown", "'TorchClassifier'?"),
        ("score.output", ..., "missing key score.output", ""),
        ("data.path", ..., "data needs either source or path", ""),
        ("data.source", "jobs.datasets:flowers", "data needs either source or path", ""),
        ("data.holdout", 1.0, "data.holdout must be in [0, 1), got 1.0", ""),
        ("data", "flowers.parquet", "data must be a mapping, got 'flowers.parquet'", ""),
        ("tracking.uri", 5, "tracking.uri must be str | None, got 5 (int)", ""),
    ],
)
def test_a_wrong_key_is_named(key: str, value: Any, message: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(with_value(key, value), tmp_path)
    assert caught.value.what == message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("epochs", "three", r"estimator\.params: .*epochs"),
        ("epochs", 0, "epochs must be at least 1, got 0"),
        ("precision", "bf61", r"precision 'bf61' is unknown(?s:.*)'bf16'"),
        ("optimizer", "Adamm", r"optimizer 'Adamm' is unknown(?s:.*)'Adam'"),
        ("loss", "CrossEntropyLos", r"loss 'CrossEntropyLos' is unknown(?s:.*)'CrossEntropyLoss'"),
        ("module", "tests.support.nets:Mpl", r"cannot import 'tests.support.nets:Mpl'(?s:.*)'Mlp'"),
    ],
)
def test_a_param_that_cannot_work_is_refused_without_a_session(
    name: str, value: Any, says: str, tmp_path: Path
) -> None:
    section = read(with_value(f"estimator.params.{name}", value), tmp_path).estimator
    with pytest.raises(SparkTorchError, match=says):
        section.build()


def test_a_python_module_that_the_session_may_ship_may_be_missing_before(tmp_path: Path) -> None:
    section = read(with_value("estimator.params.module", "nowhere.nets:Mlp"), tmp_path).estimator
    assert section.build(numWorkers=2).getNumWorkers() == 2
    section.params["loss"] = "tests.support.nets:Nothing"
    with pytest.raises(ModuleError, match=r"cannot import 'tests\.support\.nets:Nothing'"):
        section.build()


def test_a_type_error_of_a_users_module_is_not_one_of_the_params(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets_with_a_mistake.py").write_text("WIDTH = 1 + 'a'")
    monkeypatch.syspath_prepend(tmp_path)
    section = read(with_value("estimator.params.module", "nets_with_a_mistake:Mlp"), tmp_path).estimator
    with pytest.raises(TypeError, match="unsupported operand"):
        section.build()


def test_a_plan_needs_no_strategy_for_a_folder_and_a_training_does(tmp_path: Path) -> None:
    section = read(with_value("estimator.params.modelDir", str(tmp_path)), tmp_path).estimator
    assert not section.build(planned=True).isSet("strategy")
    with pytest.raises(ConfigError, match="modelDir is set, and under strategy 'ddp'"):
        section.build()
    section.params["strategy"] = "ddp"
    with pytest.raises(ConfigError, match="modelDir is set, and under strategy 'ddp'"):
        section.build(planned=True)


@pytest.mark.parametrize("text", ["a: b: c", "!!python/object/apply:os.system ['true']"])
def test_a_file_that_is_no_plain_yaml_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read(text, tmp_path)


def test_a_file_of_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="cannot read"):
        read_job(tmp_path / "job.yaml")


def test_a_folder_of_runs_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"cannot make the folder of tracking\.uri"):
        TrackingSection(uri=f"sqlite:///{tmp_path}/file/mlflow.db").connect()


def test_a_model_is_registered_by_the_name_of_the_job_or_of_tracking() -> None:
    sections: dict[str, Any] = {
        "data": DataSection(path="rows"),
        "estimator": EstimatorSection(kind="TabularClassifier"),
    }
    assert JobConfig(name="churn", **sections).registered_name == "churn"
    assert JobConfig(name="churn", tracking=TrackingSection(model="leavers"), **sections).registered_name == "leavers"


def test_the_rows_of_a_function_are_no_stream() -> None:
    with pytest.raises(ConfigError, match=r"jobs\.datasets:flowers is a function, and only files and tables can be"):
        DataSection(source="jobs.datasets:flowers").stream(Mock())


SERIES = {"orderCol": "day", "labelCol": "sold", "context": 3, "horizon": 2}


def test_a_job_may_have_every_estimator() -> None:
    names = [name for name in dir(sparktorch) if isinstance(getattr(sparktorch, name), type)]
    kinds = {name for name in names if issubclass(getattr(sparktorch, name), TorchEstimatorBase)}
    assert {kind for kind in kinds if EstimatorSection(kind=kind)} == kinds
    assert len(kinds) == 10


@pytest.mark.parametrize(
    ("kind", "params", "wrong"),
    [
        ("TabularClassifier", {"labelCol": "late", "categoricalCols": ["carrier"], "numWorkers": [2, 8]}, "inputCol"),
        ("TabularRegressor", {"labelCols": ["price", "size"]}, "featuresCol"),
        ("Recommender", {"userCol": "who", "rank": 4}, "labelCol"),
        ("Ranker", {"module": "tests.support.nets:Mlp", "groupCol": "query"}, "orderCol"),
        ("Forecaster", SERIES, "inputCols"),
    ],
)
def test_the_estimators_of_tasks_are_built_before_a_session_starts(
    kind: str, params: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    values = with_value("estimator", {"kind": kind, "params": params})
    values["data"]["holdout"] = 0.0
    estimator: Any = read(values, tmp_path).estimator.build()
    assert type(estimator).__name__ == kind
    assert all(estimator.isSet(name) for name in params)
    values["estimator"]["params"] = {**params, wrong: ["x"]}
    with pytest.raises(ConfigError, match=rf"estimator\.params '{wrong}' is unknown"):
        read(values, tmp_path)


def test_a_folder_that_an_estimator_goes_on_from_is_looked_for_before_a_session_starts(tmp_path: Path) -> None:
    values = with_value("estimator", {"kind": "TextClassifier", "params": {"modelFolder": str(tmp_path / "none")}})
    with pytest.raises(SparkTorchError, match="none"):
        read(values, tmp_path).estimator.build()


def test_without_rows_to_score_nothing_is_scored(tmp_path: Path) -> None:
    job = read(with_value("data.holdout", 0.0), tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)no rows are named to score: data\.holdout is 0.*score\.data"):
        job.to_score()
    assert read(VALUES, tmp_path).to_score() is None
    other = {"path": "others.parquet"}
    assert read(with_value("score.data", other), tmp_path).to_score() == DataSection(**other)


def test_rows_of_the_only_series_are_not_held_out(tmp_path: Path) -> None:
    values = with_value("estimator", {"kind": "Forecaster", "params": dict(SERIES)})
    with pytest.raises(ConfigError, match=r"data\.holdout is 0\.25, and rows left out of the only series are gaps"):
        read(values, tmp_path)
    values["estimator"]["params"]["groupCol"] = "shop"
    assert read(values, tmp_path).data.holdout == 0.25


def test_predictions_are_compared_with_the_column_of_the_estimator(tmp_path: Path) -> None:
    def label(kind: str, **params: Any) -> str:
        return read(with_value("estimator", {"kind": kind, "params": params}), tmp_path).label

    assert label("TorchRegressor") == "label"
    assert label("TabularClassifier", labelCol="late") == "late"
    assert label("Recommender") == "rating"
    assert label("Recommender", ratingCol="stars") == "stars"
    assert label("Recommender", implicitPrefs=True) == ""
