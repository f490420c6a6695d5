"""Replaces a folder on a file system of Hadoop's, such that the old or the new one is whole at any time."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pyspark.sql import SparkSession

from sparktorch.errors import PersistenceError

__all__ = ["save_beside"]


def save_beside(spark: SparkSession, path: str, save: Callable[[str], None]) -> None:
    """Calls `save` with the path of a new folder beside `path`, then puts that folder there, and deletes the old one.

    If `save` fails, the old folder stays. A process that dies leaves the old or the new one whole, under `path` or
    beside it: the names of folders beside it begin with a dot and end with ".new" or ".old". It needs classic Spark.

    Raises:
        PersistenceError: The file system refuses to rename a folder, or `path` is the root of one.
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
    # Hadoop takes what is before a colon for a scheme, but for names that begin with "./".
    new, old = new_path(folder, f"./{stem}.new"), new_path(folder, f"./{stem}.old")
    try:
        save(new.toString())
    except BaseException:
        with suppress(Exception):  # The error above says more.
            files.delete(new, True)
        raise
    # Hadoop moves a folder into one that exists: the old one makes way first.
    _rename(files, target, old)
    try:
        _rename(files, new, target)
    except BaseException as error:
        if not files.rename(old, target):
            raise PersistenceError(
                f"the new folder cannot be renamed to {path}, and the old one, which is now {old.toString()}, neither",
                hint="rename one of them yourself",
            ) from error
        with suppress(Exception):
            files.delete(new, True)
        raise
    files.delete(old, True)


def _rename(files: Any, source: Any, target: Any) -> None:
    """Renames a folder; Hadoop's file systems return whether they could."""
    if not files.rename(source, target):
        raise PersistenceError(
            f"{source.toString()} cannot be renamed to {target.toString()}",
            hint="the file system must allow that: save to a new path, and delete the old one",
        )
