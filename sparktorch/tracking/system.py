"""The driver's CPU, memory, disk, network and GPUs during a fit, as MLflow measures them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["SystemMetrics"]

_LOG = logging.getLogger(__name__)
_LONGEST_FINISH = 1.0


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
    except ImportError:  # psutil is missing
        return None
    return SystemMetricsMonitor(run_id)
