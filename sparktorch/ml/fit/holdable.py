"""Which rows a fit's ranks hold, and whether they can hold them for several fits."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from sparktorch.errors import ConfigError
from sparktorch.ml.fit.translate import Request
from sparktorch.spark.launch.barrier_job import control_server
from sparktorch.train.strategies.registry import strategy_for

__all__ = ["can_hold", "check_holdable", "rows_of"]

# The Params behind the arguments of `spark.frame.prepare`.
_COLUMNS = {
    "inputs": "featuresCol or inputCols",
    "label": "labelCol or labelCols",
    "weight": "weightCol",
    "validation": "validationIndicatorCol",
    "key": "idCol",
    "options": "nullPolicy, or how the inputs are described",
    "preprocess": "preprocess",
    "keyed": "split",
}


def rows_of(request: Request) -> dict[str, Any]:
    """Returns the values, by Param or group of Params, that decide which rows a fit's ranks hold."""
    config, launch = request.config, request.launch
    strategy, options = strategy_for(config.strategy, config.strategy_params)
    return {_COLUMNS[name]: value for name, value in request.columns.items()} | {
        "split": request.split,
        "strategyParams.folds": strategy.makes_validation(options),
        "storage": request.storage,
        "numWorkers": launch.world_size,
        "device": launch.device,
        "rendezvous": launch.rendezvous,
        "startTimeout": launch.patience.start,
        "stallTimeout": launch.patience.stall,
        "driverTimeout": launch.patience.driver,
        "logLevel": launch.log_level,
        "microBatchSize or accumulationSteps": config.micro_batch_size is not None or config.accumulation_steps > 1,
    }


def can_hold(request: Request, spark: SparkSession) -> bool:
    """Whether ranks can hold rows for several fits: they get the later ones from the driver."""
    return _obstacle(request, spark) is None


def check_holdable(request: Request, spark: SparkSession) -> None:
    """Refuses fits whose ranks cannot hold rows: executors do not reach the driver, or every rank gets all rows."""
    found = _obstacle(request, spark)
    if found is not None:
        what, hint, param = found
        raise ConfigError(what, hint=hint, param=param)


def _obstacle(request: Request, spark: SparkSession) -> tuple[str, str, str] | None:
    if rows_of(request)["strategyParams.folds"]:
        return "strategyParams.folds gives every worker all rows", "fit on the DataFrame", "strategyParams"
    server = control_server(spark, request.launch)
    if server is None:
        return (
            "ranks that hold rows get each fit from the driver, which they do not reach",
            "leave rendezvous at 'auto', and run where executors reach this process; or fit on the DataFrame",
            "rendezvous",
        )
    server.close()
    return None
