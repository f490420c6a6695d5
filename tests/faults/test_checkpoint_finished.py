"""A worker is lost after the last step, before the driver has the weights."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame

from sparktorch import Callback, TorchRegressor
from sparktorch.train.callbacks import FitContext
from tests.support.faults import Fault
from tests.support.nets import Score


class Notes(Callback):
    """Notes every step that rank 0 takes, in whichever attempt."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, context: FitContext) -> None:
        with self._path.open("a") as file:
            file.write(f"{context.step}\n")


def test_no_step_is_trained_twice(frame: DataFrame, tmp_path: Path) -> None:
    fault = Fault("kill", tmp_path / "marks", rank=0, at="finishing")
    estimator = TorchRegressor(
        module=Score,
        epochs=2,
        batchSize=32,
        numWorkers=2,
        progress=False,
        checkpointDir=str(tmp_path / "checkpoints"),
        maxRestarts=1,
        callbacks=[fault, Notes(tmp_path / "steps")],
    )
    summary = estimator.fit(frame).summary
    assert (tmp_path / "marks" / "done").exists()
    assert [record["epoch"] for record in summary.history] == [1, 2]
    steps = [int(line) for line in (tmp_path / "steps").read_text().split()]
    assert steps == list(range(1, summary.totalIterations + 1))
