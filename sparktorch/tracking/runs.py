"""Chooses the MLflow run of a fit: the active run, a nested run, or a new one."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from pyspark.ml.param import Params

__all__ = ["FIT_TAG", "ActiveRun", "Autologging", "Target", "active_run", "autologging", "choose", "milliseconds"]

FIT_TAG = "sparktorch.estimator"
_ID_TAG = "sparktorch.fit"
_AUTOLOG = "pyspark.ml"

_lock = threading.Lock()
_taken: set[str] = set()  # A fit, or the fits of a cross-validation, log to the runs of these ids.


class ActiveRun(NamedTuple):
    """A run that was active in a thread.

    `uri` is the tracking URI of its store; `taken` says that another fit or autologging has logged its Params to it.
    """

    uri: str
    experiment_id: str
    run_id: str
    taken: bool


class Autologging(NamedTuple):
    """The arguments of `mlflow.pyspark.ml.autolog`, with its defaults."""

    log_models: bool = True
    log_datasets: bool = True
    registered_model_name: str | None = None
    extra_tags: dict[str, str] | None = None


def _new_id() -> str:
    return uuid.uuid4().hex


def milliseconds() -> int:
    """Returns the time now in milliseconds since 1970, as MLflow counts it."""
    return int(time.time() * 1000)


@dataclass(kw_only=True)
class Target:
    """The run of one fit.

    Attributes:
        name: Name of a new run.
        uri: The tracking URI; `None` for that of the process.
        experiment: Name of the experiment; `None` for that of the parent or the process.
        parent: The run to log to, or to nest a new run under.
        creates_run: Whether the fit gets a new run; otherwise it logs to `parent`.
        elsewhere: Whether `parent` was active in another thread; it may have ended before the fit began.
        asked: Whether Params or autologging ask for a run, even without `parent`.
    """

    name: str
    uri: str | None = None
    experiment: str | None = None
    parent: ActiveRun | None = None
    creates_run: bool = True
    elsewhere: bool = False
    requested: bool = False
    tags: dict[str, str] = field(default_factory=dict)
    _id: str = field(default_factory=_new_id)
    _started: int = field(default_factory=milliseconds)
    _requested: bool = False

    @property
    def existing_run(self) -> str | None:
        """The id of the run, if it existed before the fit."""
        return None if self.creates_run or self.parent is None else self.parent.run_id

    def give_back(self) -> None:
        """Releases the existing run for the next fit, because this one was refused."""
        with _lock:
            _taken.discard(self.existing_run or "")

    def connect(self) -> MlflowClient:
        """Returns a client of the run's store."""
        from mlflow import MlflowClient

        return MlflowClient(self.uri)

    def open(self, client: MlflowClient) -> str | None:
        """Returns the run's id, and creates the run if needed.

        It is `None` if `parent` ended before the fit, and nothing else asks for a run.
        """
        if self.existing_run:
            return self.existing_run
        if self.elsewhere and self.parent:
            ended = client.get_run(self.parent.run_id).info.end_time
            if ended is not None and ended < self._started:
                if not self.requested:
                    return None
                self.parent = None
        experiment = self._experiment(client)
        if self._requested:  # This is a retry: MLflow may have created the run although the response was lost.
            runs = client.search_runs([experiment], f"tags.`{_ID_TAG}` = '{self._id}'", max_results=1)
            if runs:
                return str(runs[0].info.run_id)
        self._requested = True
        return str(
            client.create_run(experiment, start_time=self._started, run_name=self.name, tags=self._tags()).info.run_id
        )

    def _experiment(self, client: MlflowClient) -> str:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking.fluent import _get_experiment_id  # `start_run` uses it; it has no public equivalent.

        if self.experiment is None:
            # The experiment "Default" of MLflow has the id "0".
            return self.parent.experiment_id if self.parent else _get_experiment_id() or "0"
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            try:
                return str(client.create_experiment(self.experiment))
            except MlflowException:  # Another fit may have created it meanwhile.
                experiment = client.get_experiment_by_name(self.experiment)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _tags(self) -> dict[str, str]:
        from mlflow.tracking.context.registry import resolve_tags
        from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

        parent = {MLFLOW_PARENT_RUN_ID: self.parent.run_id} if self.parent else {}
        tags: dict[str, str] = resolve_tags({**self.tags, **parent, _ID_TAG: self._id})
        return tags


def active_run() -> ActiveRun | None:
    """Returns the run that is active in this thread."""
    mlflow: Any = sys.modules.get("mlflow")
    # No run can be active unless mlflow has been imported, so it is not imported here.
    run = mlflow.active_run() if mlflow is not None and hasattr(mlflow, "active_run") else None
    if run is None:
        return None
    from mlflow.utils.mlflow_tags import MLFLOW_AUTOLOGGING

    return ActiveRun(
        uri=mlflow.get_tracking_uri(),
        experiment_id=run.info.experiment_id,
        run_id=run.info.run_id,
        taken=FIT_TAG in run.data.tags or MLFLOW_AUTOLOGGING in run.data.tags,
    )


def autologging() -> Autologging | None:
    """Returns the settings of pyspark.ml autologging; `None` if it is off."""
    if "mlflow.pyspark.ml" not in sys.modules:
        return None
    from mlflow.utils.autologging_utils import autologging_is_disabled, get_autologging_config

    if autologging_is_disabled(_AUTOLOG):
        return None
    defaults = Autologging._field_defaults.items()
    return Autologging(**{name: get_autologging_config(_AUTOLOG, name, default) for name, default in defaults})


def choose(estimator: Params, caller: ActiveRun | None, autologs: Autologging | None) -> Target | None:
    """Decides where a fit in this thread is logged; `None` if it is not.

    `caller` is the run that was active in the thread that copied the estimator.
    """
    experiment = estimator.getOrDefault("mlflowExperiment") if estimator.isDefined("mlflowExperiment") else None
    name = estimator.getOrDefault("mlflowRunName") if estimator.isDefined("mlflowRunName") else None
    active = active_run()
    parent = active or caller
    is_named = experiment is not None or name is not None
    requested = is_named or autologs is not None
    if parent is None and not requested:
        return None
    # `_take` comes before `here`: it marks the caller's run as taken, also if the caller is in another thread.
    creates_run = is_named or parent is None or not _take(parent) or active is None
    return Target(
        name=name or estimator.uid,
        uri=parent.uri if parent else None,
        experiment=experiment,
        parent=parent,
        creates_run=creates_run,
        elsewhere=active is None and caller is not None,
        requested=requested,
        tags=(autologs and autologs.extra_tags) or {},
    )


def _take(run: ActiveRun) -> bool:
    """Marks the run as taken; returns whether it was free."""
    with _lock:
        free = not run.taken and run.run_id not in _taken
        _taken.add(run.run_id)
        return free
