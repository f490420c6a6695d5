"""The driver hears of a fit through a progress bar and listeners, and no listener can end it."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from sparktorch import TorchClassificationModel, TorchClassifier
from sparktorch.data.columns import Columns
from sparktorch.ml.fit import listeners as events
from sparktorch.ml.fit.listeners import Fit, FitReport
from sparktorch.ml.fit.summary import TrainingSummary
from tests.support.callbacks import Diary as Diaries

FIT = Fit(estimator=TorchClassifier(progress=False), spark=cast(Any, None))
RECORD = {"epoch": 2, "epochs": 3, "step": 4, "steps": 10, "loss": 0.25}
SUMMARY = TrainingSummary(
    history=[{"epoch": epoch, "loss": 1 / epoch, "rows_per_second": 1e4} for epoch in (1, 2, 3)],
    rows=95,
    validationRows=5,
    stepsPerEpoch=10,
    numWorkers=1,
    fingerprint="0" * 16,
    seconds={"job": 1.5},
    ranks=[{"rows": 95}],
)


class Diary:
    """Writes down what it hears, and fails where it was told to."""

    heard: list[str] = []
    fails_at = ""

    def _hear(self, what: str) -> None:
        self.heard.append(what)
        if what == self.fails_at:
            raise ValueError("planted")

    def prepared(self) -> None:
        pass

    def progress(self, record: dict[str, Any]) -> None:
        self._hear(f"step {record['step']}")

    def epoch(self, record: dict[str, Any]) -> None:
        self._hear(f"epoch {record['epoch']}")

    def finished(self, model: Any, summary: TrainingSummary) -> None:
        self._hear("finished")

    def failed(self, error: BaseException) -> None:
        self._hear(f"failed: {error}")


def listener_for(fit: Fit) -> Diary:
    assert fit is FIT
    return Diary()


def caller() -> str:
    return "here"


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(Diary, "heard", [])
    nobody = SimpleNamespace(listener_for=lambda fit: None, caller=lambda: None)
    monkeypatch.setitem(sys.modules, "nobody", cast(ModuleType, nobody))
    monkeypatch.setattr(events, "LISTENERS", ["nobody", "no_such_module", __name__])
    return Diary.heard


def test_a_listener_hears_every_epoch_and_the_end(heard: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), FitReport(FIT) as report:
        report.epoch(SUMMARY.history[0])
        report.epoch(SUMMARY.history[1])
        report.finished(TorchClassificationModel(), SUMMARY)  # an epoch that nobody told of is told now
    assert heard == ["epoch 1", "epoch 2", "epoch 3", "finished"]
    assert "listener no_such_module could not start" in caplog.text


def test_a_listener_that_fails_is_warned_about_and_heard_no_more(
    heard: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Diary, "fails_at", "epoch 1")
    with caplog.at_level(logging.WARNING), FitReport(FIT) as report:
        report.epoch({"epoch": 1})
        report.epoch({"epoch": 2})
    assert heard == ["epoch 1"]
    assert "planted" in caplog.text


def test_a_listener_hears_why_a_fit_failed(heard: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt), FitReport(FIT):
        raise KeyboardInterrupt("stop")
    assert heard == ["failed: stop"]


def test_the_bar_follows_rank_0_and_is_full_at_the_end(heard: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with FitReport(replace(FIT, estimator=TorchClassifier(batchSize=8))) as report:
        report.progress(RECORD)
        report.progress(RECORD)
        assert report._bar is not None
        assert report._bar.n == 14
        report.finished(TorchClassificationModel(), SUMMARY)
    shown = capsys.readouterr().err
    assert "30/30" in shown
    assert "epoch 3/3, loss 0.3333, 10,000 samples/s" in shown


def test_the_bar_is_full_where_a_training_ends_before_its_last_epoch(
    heard: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with FitReport(replace(FIT, estimator=TorchClassifier())) as report:
        report.progress({**RECORD, "epochs": 100})
        report.finished(TorchClassificationModel(), SUMMARY)
    assert "30/30" in capsys.readouterr().err


def test_callbacks_hear_on_the_driver_until_they_fail(
    heard: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    diary, failing = Diaries(tmp_path), Diaries(tmp_path)
    failing.places = cast(Any, None)
    fit = replace(FIT, estimator=TorchClassifier(callbacks=[failing, diary], progress=False))
    with caplog.at_level(logging.WARNING), FitReport(fit) as report:
        report.prepared(Columns(inputs=()))
        report.epoch(SUMMARY.history[0])
        report.progress(RECORD)
        report.epoch(SUMMARY.history[1])
        report.finished(TorchClassificationModel(), SUMMARY)
    assert diary.places == [RECORD]
    assert diary.told == SUMMARY.history
    assert failing.told == SUMMARY.history[:1]
    assert f"{failing!r} failed and hears no more of this fit" in caplog.text


def test_a_copy_knows_where_it_was_made(heard: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert TorchClassifier().copy()._callers == {__name__: "here"}


def test_a_summary_knows_its_course_and_survives_the_way_to_json() -> None:
    assert SUMMARY.objectiveHistory == [1, 1 / 2, 1 / 3]
    assert SUMMARY.totalIterations == 30
    assert TrainingSummary(**SUMMARY.to_dict()) == SUMMARY


def test_a_summary_counts_the_steps_of_an_epoch_that_ended_early() -> None:
    history = [{"epoch": 1, "loss": 1.0, "steps": 10}, {"epoch": 2, "loss": 0.5, "steps": 3}]
    assert replace(SUMMARY, history=history).totalIterations == 13


def test_attempts_say_which_steps_count_and_which_were_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events.time, "monotonic", lambda: -60.0)
    log = events.AttemptLog()  # long before the first attempt
    clock = iter([0.0, 0.0, 2.0, 11.0, 12.0, 12.0, 13.0, 15.0, 16.0, 17.0, 18.0, 28.0, 29.0])
    monkeypatch.setattr(events.time, "monotonic", lambda: next(clock))
    assert log.records(0) == []

    def trains(first: int, last: int) -> None:
        for step in (first, last):
            log.note({"epoch": (step - 1) // 10 + 1, "step": (step - 1) % 10 + 1, "steps": 10})

    log.begin(2)
    trains(1, 10)
    log.end("rank 1 died")
    log.begin(1)
    trains(9, 10)  # from a checkpoint of step 8, and no further than before
    assert not log.has_trained
    log.end("rank 0 died")
    log.begin(2)
    trains(9, 19)
    assert log.has_trained
    log.end("")
    found = [(each["workers"], each["steps"], each["redone"], each["training"]) for each in log.records(20)]
    assert found == [(2, 8, 2, 9.0 * 8 / 10), (1, 0, 2, 0.0), (2, 12, 0, 10.0)]
    summary = replace(SUMMARY, attempts=log.records(20))
    assert summary.goodput == pytest.approx((7.2 + 10) / 29)
    assert "attempts=3, goodput=0.593" in repr(summary)
    assert SUMMARY.goodput is None
