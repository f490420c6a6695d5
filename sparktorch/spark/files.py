"""Files that the executors fetch, once each: weights, and code that came with a model."""

from __future__ import annotations

import hashlib
import io
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession

__all__ = ["send_bytes", "send_code"]

_sent: WeakKeyDictionary[SparkSession, set[str]] = WeakKeyDictionary()


def send_bytes(spark: SparkSession, name: str, content: bytes) -> None:
    """Makes `content` a file that tasks find with `SparkFiles.get(name)`; the name tells contents apart."""
    _send(spark, name, content, pyfile=False)


def send_code(spark: SparkSession, folder: Path) -> None:
    """Puts the modules and packages in a folder on the Python path of the executors."""
    files = sorted(path for path in folder.rglob("*.py") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in files:
            archive.write(path, path.relative_to(folder))
    _send(spark, f"sparktorch-code-{digest.hexdigest()[:32]}.zip", buffer.getvalue(), pyfile=True)


def _send(spark: SparkSession, name: str, content: bytes, *, pyfile: bool) -> None:
    sent = _sent.setdefault(spark, set())
    if name in sent:
        return
    file = Path(_folder().name, name)
    if not file.exists():
        file.write_bytes(content)
    spark.addArtifacts(str(file), pyfile=pyfile, file=not pyfile)
    sent.add(name)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The folder that executors fetch from while the session lives; gone with this process."""
    return tempfile.TemporaryDirectory(prefix="sparktorch-")
