"""Spark's daemon, which forks its Python workers, with torch in it: a worker starts in milliseconds.

`spark.python.daemon.module` names it. The workers of users import all this themselves: tests/paths.
"""

from __future__ import annotations

from pyspark.daemon import manager

import tests.support.warm  # noqa: F401 - what is forked has it then

if __name__ == "__main__":
    manager()
