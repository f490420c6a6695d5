"""What executors get besides rows: values too large to travel with every task, and code that came with a model."""

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

__all__ = ["INLINE_BYTES", "Sent", "ShippingError", "add_code", "send"]

# Values beyond this size travel once per executor, not with every task.
INLINE_BYTES = 1 << 20
_PIECE = 64 << 20  # bytes that the driver's JVM holds at a time

_lock = RLock()
_sent: WeakKeyDictionary[SparkSession | SparkContext, dict[int, Sent]] = WeakKeyDictionary()
_there: WeakKeyDictionary[SparkSession | SparkContext, set[str]] = WeakKeyDictionary()  # files and folders
_written: WeakKeyDictionary[SparkContext, list[tuple[str, Any]]] = WeakKeyDictionary()  # files of the driver's Python
_code: list[Path] = []


class ShippingError(pickle.PicklingError):
    """A value cannot be pickled; the cause says why."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A value on its way to the tasks, to be named in the function that they run.

    Attributes:
        key: Identifies what was sent, and how.
        inline: The pickled value, where it is small.
        pieces: The pickled value in a classic session, where it is large.
        file: The name of the file that holds it, on Connect.
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
            if getattr(piece, "_path", None):  # it can be read again, and need not stay in memory
                vars(piece).pop("_value", None)
        return pickle.loads(content)


def send(spark: SparkSession, value: object, *, stream: bool = False) -> Sent:
    """Sends a value to the executors: with the tasks if it is small, otherwise once to each executor.

    The files of a Connect session do not reach the tasks of its streams: with these, it goes at any size.

    A Connect session, or a SparkContext, is sent a value once, as long as the value lives and can be referenced
    weakly. A SparkContext lets go of it, on the driver and on the executors, once the value is gone and so are the
    DataFrames, SQL functions and jobs whose tasks load it. A Connect server keeps it until the session ends.

    Args:
        spark: The session whose tasks will load it.
        value: What can be pickled, functions and classes of a notebook too. Changes after it was sent go unseen.
        stream: Whether the tasks are those of a stream.

    Returns:
        What the tasks' function must hold, to call `load` on. Keep it until Spark has that function.

    Raises:
        ShippingError: The value cannot be pickled.
    """
    with _lock:
        for folder in _code:
            _send_code(spark, folder)
        if stream and is_connect(spark):
            content = _pickled(value)
            return Sent(key=f"inline {hashlib.sha256(content).hexdigest()}", inline=content)
        sent = _sent.setdefault(_place(spark), {})
        if id(value) not in sent:
            new = _send(spark, _pickled(value))
            try:
                finalize(value, sent.pop, id(value), None).atexit = False
            except TypeError:  # a tuple, say
                return new
            sent[id(value)] = new
        return sent[id(value)]


def add_code(folder: Path) -> None:
    """Puts the modules and packages in a folder on the Python path of the executors, with the next value sent."""
    with _lock:
        if folder not in _code:
            _code.append(folder)


def _pickled(value: object) -> bytes:
    try:
        content: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ShippingError(str(error)) from error
    return content


def _place(spark: SparkSession) -> SparkSession | SparkContext:
    """Returns what keeps what was sent: each micro-batch of a classic stream has a session of its own."""
    return spark if is_connect(spark) else spark.sparkContext


def _send(spark: SparkSession, content: bytes) -> Sent:
    digest = hashlib.sha256(content).hexdigest()
    if len(content) <= INLINE_BYTES:
        return Sent(key=f"inline {digest}", inline=content)
    if not is_connect(spark):
        return Sent(key=f"broadcast {digest}", pieces=tuple(_broadcast(spark.sparkContext, content)))
    name, there = f"sparktorch-{digest[:32]}.pkl", _there.setdefault(_place(spark), set())
    if name not in there:
        with tempfile.TemporaryDirectory(prefix="sparktorch-") as folder:
            file = Path(folder, name)
            file.write_bytes(content)
            spark.addArtifacts(str(file), file=True)
        there.add(name)
    return Sent(key=f"file {digest}", file=name)


def _broadcast(context: SparkContext, content: bytes) -> Iterator[Broadcast[bytes]]:
    """Broadcasts bytes piece by piece; removes the files of earlier ones that nothing in the JVM refers to any more.

    Spark cleans up after a broadcast, but for the file that Python handed to the JVM.
    """
    jvm: Any = context._jvm
    kept = []
    for path, reference in _written.get(context, []):
        if reference.get() is None:
            Path(path).unlink(missing_ok=True)
        else:
            kept.append((path, reference))
    _written[context] = kept
    for start in range(0, len(content), _PIECE):
        piece: Any = context.broadcast(content[start : start + _PIECE])
        kept.append((piece._path, jvm.java.lang.ref.WeakReference(piece._jbroadcast)))
        yield piece


def _send_code(spark: SparkSession, folder: Path) -> None:
    there = _there.setdefault(_place(spark), set())
    if str(folder) in there:
        return
    content = _archive(folder)
    name = f"sparktorch-code-{hashlib.sha256(content).hexdigest()[:32]}.zip"
    if name not in there:  # several models may have come with the same code
        file = Path(_folder().name, name)
        partial = file.with_suffix(".partial")
        partial.write_bytes(content)
        os.replace(partial, file)
        add_pyfile(spark, str(file))
    there.update((name, str(folder)))


def _archive(folder: Path) -> bytes:
    """Returns the modules and packages in a folder as a zip: the same bytes for the same code, whenever it was written.

    Spark refuses another file of a name that it has.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in sorted(path for path in folder.rglob("*.py") if path.is_file()):
            archive.writestr(zipfile.ZipInfo(path.relative_to(folder).as_posix()), path.read_bytes())
    return buffer.getvalue()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The folder from which executors fetch code while the session lives; gone with this process."""
    return tempfile.TemporaryDirectory(prefix="sparktorch-")
