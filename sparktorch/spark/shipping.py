"""Ships values and code to executors: values too large for every task, and code that was saved with a model."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, finalize

from pyspark import Broadcast, SparkContext, SparkFiles, cloudpickle
from pyspark.sql import SparkSession

from sparktorch.spark.compat import add_pyfile
from sparktorch.spark.session import is_connect

__all__ = ["INLINE_BYTES", "Sent", "ShippingError", "add_code", "pickled", "send"]

# Larger values are sent once per executor, not with every task.
INLINE_BYTES = 1 << 20
# The most bytes of a broadcast, which bound the memory that the driver's JVM needs.
_PIECE_BYTES = 64 << 20

_lock = RLock()
# By the id of a value: the handle to the value that was sent.
_sent: WeakKeyDictionary[SparkSession | SparkContext, dict[int, Sent]] = WeakKeyDictionary()
# The names of files that the executors have, and of folders whose code they have.
_shipped: WeakKeyDictionary[SparkSession | SparkContext, set[str]] = WeakKeyDictionary()
# The files that the driver's Python has written for broadcasts. Java's weak references say which broadcasts are in use.
_written: WeakKeyDictionary[SparkContext, list[tuple[str, Any]]] = WeakKeyDictionary()
# Folders whose modules the executors are to have.
_code: list[Path] = []


class ShippingError(pickle.PicklingError):
    """A value cannot be pickled; the cause says why."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A handle to a value that was sent to the executors; tasks load the value with it.

    Attributes:
        key: Identifies the content, and how it was sent.
        inline: The pickled value, if small.
        pieces: Broadcasts of the pickled value, if large, in a classic session.
        file: Name of the file with the pickled value, if large, on Connect.
    """

    key: str
    inline: bytes | None = None
    pieces: tuple[Broadcast[bytes], ...] = ()
    file: str | None = None

    def load(self) -> Any:
        """Returns the value; runs in a task."""
        if self.inline is not None:
            return pickle.loads(self.inline)
        if self.file is not None:
            return pickle.loads(Path(SparkFiles.get(self.file)).read_bytes())
        content = b"".join(piece.value for piece in self.pieces)
        for piece in self.pieces:
            # A piece that has a file can be read again, so its memory is freed.
            if getattr(piece, "_path", None):
                vars(piece).pop("_value", None)
        return pickle.loads(content)


def send(spark: SparkSession, value: object, *, stream: bool = False) -> Sent:
    """Sends a value to the executors: with the tasks if it is small, otherwise once to each executor.

    A value that supports weak references is sent once per Connect session or SparkContext; later changes to it are not
    sent. A SparkContext frees it, on the driver and on the executors, once the value and all DataFrames, SQL functions
    and jobs that load it are gone. A Connect server keeps it until the session ends. With `stream`, a Connect session
    sends a value of any size with the tasks, because its files do not reach the tasks of its streams.

    Tasks call `load` on the handle. Keep a reference to the handle until Spark has pickled the tasks' function.
    """
    with _lock:
        for folder in _code:
            _send_code(spark, folder)
        if stream and is_connect(spark):
            content = pickled(value)
            return Sent(key=f"inline {hashlib.sha256(content).hexdigest()}", inline=content)
        handles = _sent.setdefault(_cache_owner(spark), {})
        if id(value) not in handles:
            handle = _send(spark, pickled(value))
            try:
                # Once the value is gone, another value may get its id. At exit, there is nothing left to forget.
                finalize(value, handles.pop, id(value), None).atexit = False
            except TypeError:  # Nothing can refer weakly to a tuple, for example.
                return handle
            handles[id(value)] = handle
        return handles[id(value)]


def add_code(folder: Path) -> None:
    """Adds the modules and packages in a folder to the Python path of the executors when the next value is sent."""
    with _lock:
        if folder not in _code:
            _code.append(folder)


def pickled(value: object) -> bytes:
    """Returns a value as cloudpickle writes it; a `ShippingError` says why it cannot."""
    try:
        content: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ShippingError(str(error)) from error
    return content


def _cache_owner(spark: SparkSession) -> SparkSession | SparkContext:
    """Returns the caches' key for a session: on classic Spark its context, since each micro-batch has a session."""
    return spark if is_connect(spark) else spark.sparkContext


def _send(spark: SparkSession, content: bytes) -> Sent:
    """Sends a pickled value in the way that suits its size and the session."""
    digest = hashlib.sha256(content).hexdigest()
    if len(content) <= INLINE_BYTES:
        return Sent(key=f"inline {digest}", inline=content)
    if not is_connect(spark):
        return Sent(key=f"broadcast {digest}", pieces=tuple(_broadcast(spark.sparkContext, content)))
    name = f"sparktorch-{digest[:32]}.pkl"
    shipped = _shipped.setdefault(_cache_owner(spark), set())
    if name not in shipped:
        with tempfile.TemporaryDirectory(prefix="sparktorch-") as folder:
            file = Path(folder, name)
            file.write_bytes(content)
            spark.addArtifacts(str(file), file=True)
        shipped.add(name)
    return Sent(key=f"file {digest}", file=name)


def _broadcast(context: SparkContext, content: bytes) -> Iterator[Broadcast[bytes]]:
    """Broadcasts bytes in pieces; removes the files of earlier broadcasts that the JVM no longer references.

    Spark frees unused broadcasts, except for the file through which Python passed the bytes to the JVM.
    """
    jvm: Any = context._jvm
    in_use = []
    for path, reference in _written.get(context, []):
        if reference.get() is None:
            Path(path).unlink(missing_ok=True)
        else:
            in_use.append((path, reference))
    _written[context] = in_use
    for start in range(0, len(content), _PIECE_BYTES):
        piece: Any = context.broadcast(content[start : start + _PIECE_BYTES])
        in_use.append((piece._path, jvm.java.lang.ref.WeakReference(piece._jbroadcast)))
        yield piece


def _send_code(spark: SparkSession, folder: Path) -> None:
    """Sends the code in a folder, unless the executors have it."""
    shipped = _shipped.setdefault(_cache_owner(spark), set())
    if str(folder) in shipped:
        return
    content = _archive(folder)
    name = f"sparktorch-code-{hashlib.sha256(content).hexdigest()[:32]}.zip"
    if name not in shipped:  # Several models may share the same code.
        file = Path(_folder().name, name)
        # Executors may be fetching a file with this name for another session, so it is replaced as a whole.
        partial = file.with_suffix(".partial")
        partial.write_bytes(content)
        os.replace(partial, file)
        add_pyfile(spark, str(file))
    shipped.update((name, str(folder)))


def _archive(folder: Path) -> bytes:
    """Returns the modules in a folder as a zip file; for the same code, it has the same bytes, as Spark demands."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in sorted(path for path in folder.rglob("*.py") if path.is_file()):
            archive.writestr(zipfile.ZipInfo(path.relative_to(folder).as_posix()), path.read_bytes())
    return buffer.getvalue()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Returns the folder from which executors fetch code; it is removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="sparktorch-")
