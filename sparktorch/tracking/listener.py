"""Logs a fit to MLflow while it runs, from the driver: the executors hold no credentials."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from sparktorch.tracking import figures
from sparktorch.tracking import run_metadata as facts
from sparktorch.tracking.async_logger import Outbox, Sample
from sparktorch.tracking.runs import FIT_TAG, ActiveRun, Autologging, Target, active_run, autologging, choose
from sparktorch.tracking.system import SystemMetrics

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from pyspark.ml import Model

    from sparktorch.ml.fit.listeners import Fit
    from sparktorch.ml.summary import TrainingSummary

__all__ = ["MLflowListener", "caller", "listener_for"]

_LOG = logging.getLogger(__name__)
_LONGEST_ERROR = 5000
_ERROR_TAG = "sparktorch.error"


def caller() -> ActiveRun | None:
    """Returns the run that is active in this thread; fits in other threads are told."""
    return active_run()


def listener_for(fit: Fit) -> MLflowListener | None:
    """Returns a listener for a fit that belongs to a run or asks for one, `None` for any other."""
    autologs = autologging()
    target = choose(fit.estimator, fit.callers.get(__name__), autologs)
    return MLflowListener(fit, target, autologs) if target is not None else None


class MLflowListener:
    """Logs one fit. Everything goes through an outbox, so nothing here waits for MLflow but the end."""

    def __init__(self, fit: Fit, target: Target, autologs: Autologging | None) -> None:
        """Logs the Params to a run of the fit's own; to the caller's once the fit has passed its checks."""
        self._fit = fit
        self._target = target
        self._autologs = autologs
        self._environment = facts.environment(fit)
        self._system = SystemMetrics(target.known_run, self._log)
        self._outbox = Outbox(self._connect, target.open)
        if target.own:
            self._begin()

    def prepared(self) -> None:
        """Logs the estimator's Params, where that has not been done."""
        if not self._target.own:
            self._outbox.send(_forget_error)  # of a fit that was refused before
            self._begin()

    def _begin(self) -> None:
        fit = self._fit
        self._tag({FIT_TAG: type(fit.estimator).__name__})
        self._outbox.send(partial(_log_params, facts.params(fit.estimator)))
        validated = fit.estimator.isSet("validationIndicatorCol")
        classes = validated and fit.estimator.hasParam("rawPredictionCol")
        self._outbox.send(lambda client, run: figures.preload(classes=classes))

    def progress(self, record: dict[str, Any]) -> None:
        """Logs the loss of a step, its number among all optimizer steps as step."""
        self._log({"step_loss": record["loss"]}, (record["epoch"] - 1) * record["steps"] + record["step"])

    def epoch(self, record: dict[str, Any]) -> None:
        """Logs the epoch's metrics, the number of the epoch as step, and validations by step at theirs."""
        for validation in record.get("validations", ()):
            self._log(
                {f"step_{name}": value for name, value in validation.items() if name != "step"}, validation["step"]
            )
        by_epoch = {name: value for name, value in record.items() if name not in ("epoch", "steps", "validations")}
        self._log(by_epoch, record["epoch"])

    def finished(self, model: Model, summary: TrainingSummary) -> None:
        """Logs what is known at the end: data set, figures, environment, where the time went."""
        self._log({f"seconds.{name}": value for name, value in summary.seconds.items()}, 0)
        self._tag(
            {
                "sparktorch.rows": summary.rows,
                "sparktorch.validation_rows": summary.validationRows,
                "sparktorch.data_digest": summary.fingerprint,
                "sparktorch.num_workers": summary.numWorkers,
            }
        )
        send, autologs, columns = self._outbox.send, self._autologs, self._fit.columns
        if columns is not None and (autologs is None or autologs.log_datasets):
            send(lambda client, run: client.log_inputs(run, [facts.data_set(columns, summary)]))
        curve = partial(figures.loss_curve, summary.history)
        send(lambda client, run: client.log_figure(run, curve(), "figures/loss.png"))
        if summary.confusionMatrix is not None:
            matrix = partial(figures.confusion_matrix, summary.confusionMatrix)
            send(lambda client, run: client.log_figure(run, matrix(), "figures/confusion_matrix.png"))
        if autologs is not None and autologs.log_models and not self._target.elsewhere:
            send(partial(_log_model, model, autologs.registered_model_name))
        self._environment["hosts"] = [rank["host"] for rank in summary.ranks]
        self._environment["devices"] = [rank["device"] for rank in summary.ranks]
        self._end("FINISHED")
        if autologs is not None:
            # Autologging adds to this run what evaluators find of the model.
            model._mlflow_run_id = self._outbox.run_id  # type: ignore[attr-defined]

    def failed(self, error: BaseException) -> None:
        """Notes why the fit failed."""
        self._tag({_ERROR_TAG: (str(error) or type(error).__name__)[:_LONGEST_ERROR]})
        if self._target.own or self._fit.columns is not None:
            self._end("FAILED")
        else:  # the run is as good as before for the fit that comes next
            self._system.finish()
            self._outbox.close()
            self._target.give_back()

    def _connect(self) -> MlflowClient:
        client = self._target.connect()
        # Started here, behind the import of MLflow: two threads importing it at once can meet half of it.
        self._system.start()
        return client

    def _log(self, values: dict[str, float], step: int) -> None:
        now = _milliseconds()
        self._outbox.metrics(Sample(name, value, now, step) for name, value in values.items())

    def _tag(self, tags: dict[str, Any]) -> None:
        for name, value in tags.items():
            self._outbox.send(partial(_set_tag, name, str(value)))

    def _end(self, status: str) -> None:
        self._system.finish()
        self._outbox.send(lambda client, run: client.log_dict(run, self._environment, "environment.json"))
        if self._target.own:  # the caller ends the run that the caller began
            now = _milliseconds()
            self._outbox.send(lambda client, run: client.set_terminated(run, status, now))
        self._outbox.close()


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _log_params(values: dict[str, str], client: MlflowClient, run_id: str) -> None:
    """Logs Params; those that the run has with another value, which MLflow would refuse all for, keep it."""
    from mlflow.entities import Param

    known = client.get_run(run_id).data.params
    others = [name for name, value in values.items() if known.get(name, value) != value]
    if others:
        _LOG.warning("the MLflow run has other values of %s already, and keeps them", ", ".join(others))
    client.log_batch(run_id, params=[Param(name, value) for name, value in values.items() if name not in known])


def _forget_error(client: MlflowClient, run_id: str) -> None:
    if _ERROR_TAG in client.get_run(run_id).data.tags:
        client.delete_tag(run_id, _ERROR_TAG)


def _set_tag(name: str, value: str, client: MlflowClient, run_id: str) -> None:
    client.set_tag(run_id, name, value)


def _log_model(model: Any, registered_model_name: str | None, client: MlflowClient, run_id: str) -> None:
    from sparktorch.tracking.flavor import log_model

    log_model(model, run_id=run_id, registered_model_name=registered_model_name)
