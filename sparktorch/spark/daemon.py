"""Spark's daemon, which forks Python workers, with torch and this package imported: a worker starts in milliseconds.

`spark.python.daemon.module=sparktorch.spark.daemon` makes Spark use it. The executors must have this package installed:
shipped files come to workers, not to the daemon.
"""

import gc
import importlib
from contextlib import suppress

from pyspark.daemon import manager

__all__: list[str] = []

# Ranks and scoring import these modules.
_MODULES = ("sparktorch.spark.launch.rank_task", "sparktorch.spark.scoring_udf", "sparktorch.worker", "torch._dynamo")

if __name__ == "__main__":
    for name in _MODULES:
        importlib.import_module(name)
    package = importlib.import_module("sparktorch")
    for name in package.__all__:  # Modules of users import public names.
        with suppress(ImportError):  # Some names need libraries that are not installed.
            getattr(package, name)
    # Collections do not write to frozen objects, so that forked workers share their memory.
    gc.freeze()
    manager()
