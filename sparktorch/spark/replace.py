"""Replaces a folder on one of Hadoop's file systems, so that the old or the new folder is whole at any time."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pyspark.sql import SparkSession

from sparktorch.errors import PersistenceError

__all__ = ["save_beside"]


def save_beside(spark: SparkSession, path: str, save: Callable[[str], None]) -> None:
    """Calls `save` with a new folder beside `path`, then moves that folder to `path`, and deletes the old folder.

    If `save` fails, the old folder stays. A process that dies leaves the old or the new folder whole, under `path` or
    beside it: the names of folders beside it begin with a dot and end with ".new" or ".old". It needs classic Spark.

    Raises:
        PersistenceError: The file system refuses to rename a folder, or `path` is the root of a file system.
    """
    session: Any = spark  # pyspark has no types of its JVM.
    new_path = session._jvm.org.apache.hadoop.fs.Path
    target = new_path(path)
    files = target.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
    if not files.exists(target):
        save(path)
        return
    folder = target.getParent()
    if folder is None:
        raise PersistenceError(f"{path} is the root of a file system", hint="name a folder in it")
    stem = f".{target.getName()}.{secrets.token_hex(4)}"
    # Hadoop takes text before a colon for a scheme, unless the name begins with "./".
    new = new_path(folder, f"./{stem}.new")
    old = new_path(folder, f"./{stem}.old")
    try:
        save(new.toString())
    except BaseException:
        with suppress(Exception):  # The error above says more.
            files.delete(new, True)
        raise
    # Hadoop would move the new folder into the old one, so the old folder makes way first.
    _rename(files, target, old)
    try:
        _rename(files, new, target)
    except BaseException as error:
        if not files.rename(old, target):
            raise PersistenceError(
                f"the new folder cannot be renamed to {path}, and the old one, which is now {old.toString()}, neither",
                hint="rename one of them yourself",
            ) from error
        with suppress(Exception):  # The error above says more.
            files.delete(new, True)
        raise
    files.delete(old, True)


def _rename(files: Any, source: Any, target: Any) -> None:
    """Renames a folder; raises if Hadoop returns that it could not."""
    if not files.rename(source, target):
        raise PersistenceError(
            f"{source.toString()} cannot be renamed to {target.toString()}",
            hint="the file system must allow that: save to a new path, and delete the old one",
        )
