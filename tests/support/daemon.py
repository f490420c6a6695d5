"""Spark's daemon, which forks its Python workers, with torch and this package in it: a worker starts in milliseconds.

`spark.python.daemon.module` names it. The workers of users import all this themselves: tests/paths.
"""

from __future__ import annotations

import gc
import importlib

from pyspark.daemon import manager

import tests.support.warm  # noqa: F401 - what is forked has it then

if __name__ == "__main__":
    for tasks in ("sparktorch.spark.launch.rank_task", "sparktorch.spark.scoring_udf", "sparktorch.worker"):
        importlib.import_module(tasks)
    gc.freeze()
    manager()
