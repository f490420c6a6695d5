"""Logs a fit to MLflow while it runs, from the driver, so that executors need no credentials."""

from __future__ import annotations

import json
import logging
import platform
import re
import threading
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import sparktorch
from sparktorch.base.imports import matplotlib
from sparktorch.base.redact import display_text
from sparktorch.errors import redacted
from sparktorch.ml.scoring import figures
from sparktorch.spark.session import java_version, setting
from sparktorch.tracking.async_logger import Outbox, Sample
from sparktorch.tracking.runs import (
    FIT_TAG,
    ActiveRun,
    Autologging,
    Target,
    active_run,
    autologging,
    choose,
    milliseconds,
)
from sparktorch.tracking.signature import column_type

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput
    from pyspark.ml import Model
    from pyspark.ml.param import Params

    from sparktorch.data.columns import Columns
    from sparktorch.ml.fit.listeners import Fit
    from sparktorch.ml.fit.summary import TrainingSummary

__all__ = ["MLflowListener", "SystemMetrics", "caller", "data_set", "environment", "listener_for", "params"]

_LOG = logging.getLogger(__name__)
_LONGEST_ERROR = 5000
_LONGEST_PARAM = 500  # Every MLflow store accepts so many characters of a Param's value.
_PACKAGES = ("torch", "pyspark", "pyarrow", "numpy", "mlflow")
_LONGEST_FINISH = 1.0  # A fit waits so many seconds for its last system metrics.
_ERROR_TAG = "sparktorch.error"


def caller() -> ActiveRun | None:
    """Returns the active run of this thread, for fits in other threads."""
    return active_run()


def listener_for(fit: Fit) -> MLflowListener | None:
    """Returns a listener if the fit belongs to a run or asks for one, else `None`."""
    autologs = autologging()
    target = choose(fit.estimator, fit.callers.get(__name__), autologs)
    return MLflowListener(fit, target, autologs) if target is not None else None


class MLflowListener:
    """Logs one fit. Everything goes through an `Outbox`, so only the end waits for MLflow."""

    def __init__(self, fit: Fit, target: Target, autologs: Autologging | None) -> None:
        """Starts logging: at once to the fit's own run, to the caller's run only after the checks (`prepared`)."""
        self._fit = fit
        self._target = target
        self._autologs = autologs
        self._environment = environment(fit)
        self._names: dict[str, str] = {}  # A metric's name in MLflow leads to its name in the fit.
        self._system = SystemMetrics(target.existing_run, self._log)
        self._outbox = Outbox(self._connect, target.open)
        if target.creates_run:
            self._begin()

    def prepared(self) -> None:
        """Logs the Params to the caller's run."""
        if not self._target.creates_run:
            self._outbox.send(_forget_error)  # An earlier fit may have been refused, and the run have its error.
            self._begin()

    def _begin(self) -> None:
        fit = self._fit
        self._tag({FIT_TAG: fit.kind})
        self._outbox.send(partial(_log_params, params(fit.estimator)))
        self._outbox.send(_import_matplotlib)  # Its first import takes seconds, which pass while the fit trains.

    def progress(self, record: dict[str, Any]) -> None:
        """Logs the loss of a step, with the optimizer step as MLflow's step."""
        if record["loss"] is None:
            return
        self._log({"step_loss": record["loss"]}, (record["epoch"] - 1) * record["steps"] + record["step"])

    def epoch(self, record: dict[str, Any]) -> None:
        """Logs the epoch's metrics with the epoch as MLflow's step, and validations by step with their step."""
        for validation in record.get("validations", ()):
            self._log(
                {f"step_{name}": value for name, value in validation.items() if name != "step"}, validation["step"]
            )
        left_out = ("epoch", "steps", "validations", "untrained")
        by_epoch = {name: value for name, value in record.items() if name not in left_out}
        self._log(by_epoch, record["epoch"])

    def finished(self, model: Model, summary: TrainingSummary) -> None:
        """Logs data set, figures, environment and phase times."""
        self._log({f"seconds.{name}": value for name, value in summary.seconds.items()}, 0)
        if summary.goodput is not None:
            self._log({"goodput": summary.goodput, "attempts": len(summary.attempts)}, 0)
        best = {f"best.{name}": value for name, value in summary.best.items()}
        self._log(best | {f"baseline.{name}": value for name, value in summary.baseline.items()}, 0)
        if summary.heldOut:
            self._tag({"sparktorch.held_out": summary.heldOut["by"]})
        self._tag(
            {
                "sparktorch.ended": summary.ended,
                "sparktorch.rows": summary.rows,
                "sparktorch.validation_rows": summary.validationRows,
                "sparktorch.data_digest": summary.fingerprint,
                "sparktorch.num_workers": summary.numWorkers,
            }
        )
        send, autologs, columns = self._outbox.send, self._autologs, self._fit.columns
        # Data set and figures are made in the thread of the outbox, so that the fit does not wait for them.
        if columns is not None and (autologs is None or autologs.log_datasets):
            send(partial(_log_data_set, partial(data_set, columns, summary)))
        send(partial(_log_figure, "loss", partial(figures.loss_curve, summary.history)))
        if summary.confusionMatrix is not None:
            matrix = partial(figures.confusion_matrix, summary.confusionMatrix, getattr(model, "labels", ()))
            send(partial(_log_figure, "confusion_matrix", matrix))
        if autologs is not None and autologs.log_models and not self._target.elsewhere:
            # What is logged may name the folder of the weights, so a search must not delete it.
            model._mlflow_logged = True  # type: ignore[attr-defined]
            send(partial(_log_model, model, autologs.registered_model_name))
        self._environment |= {"world_size": summary.numWorkers, "attempts": list(summary.attempts)}
        self._environment |= {f"{name}s": [rank[name] for rank in summary.ranks] for name in ("host", "device")}
        self._end("FINISHED")
        if autologs is not None:
            # Autologging adds the metrics of evaluators to this run.
            model._mlflow_run_id = self._outbox.run_id  # type: ignore[attr-defined]

    def ended(self) -> None:
        """Ends the run of a function."""
        self._end("FINISHED")

    def failed(self, error: BaseException) -> None:
        """Logs the error."""
        self._tag({_ERROR_TAG: (str(error) or type(error).__name__)[:_LONGEST_ERROR]})
        if self._target.creates_run or self._fit.columns is not None:
            self._end("FAILED")
        else:  # A fit that was refused leaves the caller's run to the next fit.
            self._system.finish()
            self._outbox.close()
            self._target.give_back()

    def _connect(self) -> MlflowClient:
        client = self._target.connect()
        # Start after importing MLflow: two threads that import it at once may see a partial module.
        self._system.start()
        return client

    def _log(self, values: dict[str, float], step: int) -> None:
        now = milliseconds()
        self._outbox.metrics(Sample(self._named(name), value, now, step) for name, value in values.items())

    def _named(self, name: str) -> str:
        """Returns a metric's name in MLflow: only with characters that it takes, and with "_" until no other has it."""
        in_mlflow, count = re.sub(r"[^/\w.\- :]", "_", name), len(self._names)
        while self._names.setdefault(in_mlflow, name) != name:
            in_mlflow += "_"
        if in_mlflow != name and len(self._names) > count:
            _LOG.warning(
                "the metric %r is %r in MLflow, which takes no other characters and each name once", name, in_mlflow
            )
        return in_mlflow

    def _tag(self, tags: dict[str, Any]) -> None:
        for name, value in tags.items():
            self._outbox.send(partial(_set_tag, name, str(value)))

    def _end(self, status: str) -> None:
        self._system.finish()
        self._outbox.send(partial(_log_environment, self._environment))
        if self._target.creates_run:  # The caller ends a run that it has started.
            self._outbox.send(partial(_end_run, status, milliseconds()))
        self._outbox.close()


def _log_params(values: dict[str, str], client: MlflowClient, run_id: str) -> None:
    """Logs the Params that the run does not have; MLflow would reject all if one had another value."""
    from mlflow.entities import Param

    logged = client.get_run(run_id).data.params
    differing = [name for name, value in values.items() if logged.get(name, value) != value]
    if differing:
        _LOG.warning("the MLflow run has other values of %s already, and keeps them", ", ".join(differing))
    client.log_batch(run_id, params=[Param(name, value) for name, value in values.items() if name not in logged])


def _log_data_set(make: Callable[[], Any], client: MlflowClient, run_id: str) -> None:
    from mlflow.exceptions import MlflowException

    run_input = make()
    try:
        client.log_inputs(run_id, [run_input])
    except MlflowException:  # Another fit on the same rows may have created the data set meanwhile.
        client.log_inputs(run_id, [run_input])


def _import_matplotlib(client: MlflowClient, run_id: str) -> None:
    matplotlib()


def _log_figure(name: str, draw: Callable[[], Any], client: MlflowClient, run_id: str) -> None:
    client.log_figure(run_id, draw(), f"figures/{name}.png")


def _log_environment(values: dict[str, Any], client: MlflowClient, run_id: str) -> None:
    client.log_dict(run_id, values, "environment.json")


def _end_run(status: str, end_time: int, client: MlflowClient, run_id: str) -> None:
    client.set_terminated(run_id, status, end_time)


def _forget_error(client: MlflowClient, run_id: str) -> None:
    if _ERROR_TAG in client.get_run(run_id).data.tags:
        client.delete_tag(run_id, _ERROR_TAG)


def _set_tag(name: str, value: str, client: MlflowClient, run_id: str) -> None:
    client.set_tag(run_id, name, value)


def _log_model(model: Any, registered_model_name: str | None, client: MlflowClient, run_id: str) -> None:
    from sparktorch.tracking.flavor import log_model

    log_model(model, run_id=run_id, registered_model_name=registered_model_name)


def params(estimator: Params) -> dict[str, str]:
    """Returns the Params that are set or have a default, as readable text."""
    values = {param.name: value for param, value in estimator.extractParamMap().items()}
    return {
        name: (redacted(value) if isinstance(value, str) else display_text(value))[:_LONGEST_PARAM]
        for name, value in sorted(values.items())
    }


def environment(fit: Fit) -> dict[str, Any]:
    """Returns versions and cluster of the fit, JSON-serializable."""
    return {
        "python": platform.python_version(),
        "sparktorch": sparktorch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "java": java_version(fit.spark),
        "spark": fit.spark.version,
        "spark.master": setting(fit.spark, "spark.master"),
        "world_size": fit.estimator.getOrDefault("numWorkers"),
    }


def data_set(columns: Columns, summary: TrainingSummary) -> DatasetInput:
    """Returns the training set as the input of a run; needs no Spark job."""
    from mlflow.data.code_dataset_source import CodeDatasetSource
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.tracking.context.registry import resolve_tags
    from mlflow.types import ColSpec, Schema
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    schema = Schema(
        [ColSpec(column_type(spec), name) for spec in columns.tensors for name in spec.sources or (spec.column,)]
    )
    profile = {"num_rows": summary.rows, "num_validation_rows": summary.validationRows}
    source = CodeDatasetSource(resolve_tags())
    data = Dataset(
        name="dataset",
        digest=summary.fingerprint,
        source_type=source._get_source_type(),
        source=source.to_json(),
        schema=json.dumps({"mlflow_colspec": schema.to_dict()}),
        profile=json.dumps(profile),
    )
    return DatasetInput(data, [InputTag(MLFLOW_DATASET_CONTEXT, "train")])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # For example, mlflow-skinny has no distribution of the name mlflow.
        return None


class SystemMetrics:
    """Measures at MLflow's interval and once more at the end.

    MLflow's monitor measures, and the fit's `Outbox` sends, because it survives an outage. Nothing is
    measured without psutil, if system metrics are switched off, or if MLflow measures the run already.
    """

    def __init__(self, run_id: str | None, log: Callable[[dict[str, float], int], None]) -> None:
        """Prepares to measure for a run that existed before the fit, or a new one (`None`).

        `log` is called with the values of each measurement by name, and its number.
        """
        self._run_id = run_id
        self._log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sparktorch-system-metrics", daemon=True)

    def start(self) -> None:
        """Starts measuring in a thread, unless the fit has already ended."""
        self._thread.start()

    def finish(self) -> None:
        """Measures for the last time."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_LONGEST_FINISH)

    def _work(self) -> None:
        try:
            monitor = None if self._stop.is_set() else _monitor(self._run_id)
            step = 0
            while monitor is not None and not self._stop.is_set():
                for _ in range(monitor.samples_before_logging):
                    monitor.collect_metrics()
                    self._stop.wait(monitor.sampling_interval)
                monitor.collect_metrics()
                prefix = f"system/{monitor.node_id}/" if monitor.node_id else "system/"
                self._log({prefix + name: value for name, value in monitor.aggregate_metrics().items()}, step)
                for part in monitor.monitors:
                    part.clear_metrics()
                step += 1
        except Exception:
            _LOG.warning("system metrics are not logged", exc_info=True)


def _monitor(run_id: str | None) -> Any:
    from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
    from mlflow.tracking.fluent import run_id_to_system_metrics_monitor

    switched_off = MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.is_set() and not MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get()
    if switched_off or run_id in run_id_to_system_metrics_monitor:
        return None
    try:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
    except ImportError:  # The library psutil is missing.
        return None
    return SystemMetricsMonitor(run_id)
