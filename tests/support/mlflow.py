"""What MLflow warns about by itself, for the tests to overhear."""

from __future__ import annotations

import pytest

__all__ = ["QUIET"]

# Marks for the tests that use MLflow.
QUIET = [
    # MLflow's SQLAlchemy store leaves its connections to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <sqlite3:pytest.PytestUnraisableExceptionWarning"),
    # MLflow warns about its own type hints when mlflow.pyfunc is imported.
    pytest.mark.filterwarnings("ignore:.*is inferred as AnyType:UserWarning"),
    # MLflow 3.17 against the pydantic, SQLAlchemy and Alembic of today.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
