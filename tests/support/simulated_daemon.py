"""Spark's daemon on a machine with simulated accelerators: each Python worker that it forks finds them.

`spark.python.daemon.module` names it.
"""

from __future__ import annotations

import importlib
import os
from functools import partial

from pyspark.daemon import manager

import tests.support.warm  # noqa: F401 - what is forked has it then

if __name__ == "__main__":
    # The devices are of no use in a child of the process that has registered them, as on CUDA.
    os.register_at_fork(after_in_child=partial(importlib.import_module, "tests.support.simulated"))
    manager()
