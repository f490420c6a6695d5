"""Logs a fit to MLflow while it runs, from the driver: the executors hold no credentials."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator, Model

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from sparktorch.ml.summary import TrainingSummary

__all__ = ["MLflowListener", "listener_for"]

_FIT_TAG = "sparktorch.estimator"
_PARENT_TAG = "mlflow.parentRunId"
_LONGEST = 500  # what every MLflow store takes as a Param's value


def listener_for(estimator: Estimator[Any]) -> MLflowListener | None:
    """Returns a listener for a fit inside an active MLflow run, `None` outside of one."""
    mlflow: Any = sys.modules.get("mlflow")
    # A run can only be active where mlflow has been imported already; nobody else pays for it.
    active = mlflow.active_run() if mlflow is not None and hasattr(mlflow, "active_run") else None
    if active is None:
        return None
    return MLflowListener(mlflow.MlflowClient(), active.info, estimator)


class MLflowListener:
    """Logs one fit: into the active run, or into a run nested under it where that holds a fit already."""

    def __init__(self, client: MlflowClient, run: Any, estimator: Estimator[Any]) -> None:
        """Logs the estimator's Params."""
        self._client = client
        self._nested = _FIT_TAG in client.get_run(run.run_id).data.tags
        self._run_id = run.run_id
        if self._nested:
            tags = {_PARENT_TAG: run.run_id, "mlflow.user": run.user_id}
            child = client.create_run(run.experiment_id, run_name=estimator.uid, tags=tags)
            self._run_id = child.info.run_id
        client.set_tag(self._run_id, _FIT_TAG, type(estimator).__name__)
        from mlflow.entities import Param

        values = {param.name: _shown(value) for param, value in estimator.extractParamMap().items()}
        logged = [Param(name, value[:_LONGEST]) for name, value in sorted(values.items())]
        client.log_batch(self._run_id, params=logged)

    def epoch(self, record: dict[str, Any]) -> None:
        """Logs the epoch's metrics, the number of the epoch as step."""
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        step = record["epoch"]
        metrics = [Metric(name, value, now, step) for name, value in record.items() if name != "epoch"]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finished(self, model: Model, summary: TrainingSummary) -> None:
        """Logs what is known at the end: sizes, digest of the data, where the time went."""
        facts = {
            "sparktorch.rows": summary.rows,
            "sparktorch.validation_rows": summary.validationRows,
            "sparktorch.data_digest": summary.fingerprint,
            "sparktorch.num_workers": summary.numWorkers,
        }
        for name, value in facts.items():
            self._client.set_tag(self._run_id, name, str(value))
        for name, value in summary.seconds.items():
            self._client.log_metric(self._run_id, f"seconds.{name}", value)
        self._end("FINISHED")

    def failed(self, error: BaseException) -> None:
        """Notes why the fit failed."""
        self._client.set_tag(self._run_id, "sparktorch.error", str(error)[:5000])
        self._end("FAILED")

    def _end(self, status: str) -> None:
        if self._nested:  # the caller ends the run that the caller began
            self._client.set_terminated(self._run_id, status)


def _shown(value: Any) -> str:
    """Returns a Param's value as a person would write it."""
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", None) or type(value).__qualname__
    return str(value)
