"""What MLflow warns about by itself, for the tests to overhear; whether a server of its answers."""

from __future__ import annotations

import pytest
import requests

__all__ = ["QUIET", "answers"]

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


def answers(url: str) -> bool:
    """Returns whether a server answers there, and has nothing to complain of."""
    try:
        return requests.get(url, timeout=5).ok
    except requests.RequestException:
        return False
