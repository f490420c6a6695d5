"""A directory on any file system that fsspec supports: its files, written atomically, and the lease on it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparktorch.base.no_op import no_op
from sparktorch.errors import ClusterError, PersistenceError

__all__ = ["CLAIM", "Directory", "Lease", "cannot_write", "claim_in"]

# This file says who may write into a directory; at any time, that is one attempt of one fit.
CLAIM = "claim.json"

# These errors say that a file is missing or unreadable, and not that the directory cannot be reached.
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
# Mounts of object stores answer a hard link with one of these errors.
_NO_LINKS = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
# File systems that know no sync answer it with one of these errors.
_NO_SYNC = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
# Files are read and written in blocks of these sizes; each block counts as progress.
_READ_BYTES = 4 << 20
_WRITE_BYTES = 64 << 20
# A lease expires if it is not renewed for this long.
_CLAIM_SECONDS = 30.0


class Directory:
    """The files under one URL, by name; a name may contain a folder, but cannot lead out of the directory."""

    def __init__(self, url: str, moved: Callable[[], object] = no_op) -> None:
        """Opens the directory, which need not exist; `moved` is called for every few MB, and counts them as progress.

        A `PersistenceError` says that the file system is unknown, or its package is not installed.
        """
        import fsspec  # The import is slow, and needed for checkpoints only.
        from fsspec.implementations.local import LocalFileSystem

        self.url = url
        self._moved = moved
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise PersistenceError(
                f"checkpointDir {url!r} cannot be opened: {error}", param="checkpointDir", code="ST-CHECKPOINT-DIR"
            ) from error
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self._root = root.rstrip("/")

    def put(self, name: str, content: bytes, *, new: bool = False) -> None:
        """Writes a file atomically, and creates its folder; replaces a file of the same name.

        On remote file systems, a file of more than 64 MB may be truncated if writing fails. If the file must be `new`,
        an existing file raises `FileExistsError`; a file system that cannot guarantee this may replace it nevertheless.
        Some file systems raise other exceptions than `OSError`.
        """
        path = self._path(name)
        if self.is_local:
            _put_local(Path(path), content, self._moved, new=new)
        elif len(content) > _WRITE_BYTES:
            # A failure may truncate the file. Readers notice this by the manifest, which is small, and therefore
            # written in one piece.
            with self._fs.open(path, "wb") as file:
                for block in _blocks(content):
                    file.write(block)
                    self._moved()
        elif not (new and self._create(path, content)):
            self._fs.pipe_file(path, content)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Returns the bytes of a file, from `start` to before `end`.

        A `ClusterError` says that the directory cannot be reached.
        """
        with self._reaching():
            content: bytes = self._fs.cat_file(self._path(name), start=start, end=end)
            self._moved()
            return content

    def measure(self, name: str) -> dict[str, Any]:
        """Returns size in bytes and SHA-256 of a file; raises what `read` does."""
        digest = hashlib.sha256()
        size = 0
        with self._reaching(), self._fs.open(self._path(name), "rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                size += len(block)
                self._moved()
        return {"bytes": size, "sha256": digest.hexdigest()}

    def exists(self, name: str) -> bool:
        """Returns whether there is a file of this name; raises `ClusterError` as `read` does."""
        with self._reaching():
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._path(name)))

    def names(self) -> list[str]:
        """Returns the names of files and folders; there are none if the directory does not exist."""
        with self._reaching():
            self._fs.invalidate_cache()
            if not self._fs.isdir(self._root):
                return []
            return [path.rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)]

    def remove(self, name: str) -> None:
        """Removes a file, a folder with its content, or a link without its target."""
        folder, _, last = name.rpartition("/")
        with suppress(FileNotFoundError):
            path = f"{self._path(folder) if folder else self._root}/{last}"
            if self.is_local and os.path.islink(path):
                os.unlink(path)
            else:
                self._fs.rm(path, recursive=True)

    def link(self, name: str, target: Path) -> None:
        """Makes `target`, a path that does not exist yet, a link to a local file; raises what `read` does."""
        with self._reaching():
            target.symlink_to(self._path(name))

    def _create(self, path: str, content: bytes) -> bool:
        """Writes a file that must not exist yet; returns whether the file system could guarantee that."""
        try:
            self._fs.pipe_file(path, content, mode="create")
        except FileExistsError:
            raise
        except Exception:  # Any other problem shows again in the plain write.
            return False
        return True

    def _path(self, name: str) -> str:
        """Returns the path of a file; raises `FileNotFoundError` for a link or name that leads out of the directory."""
        path = f"{self._root}/{name}"
        # Whoever can write into the directory could place a link there that makes this process read another file.
        if self.is_local and os.path.realpath(path) != f"{os.path.realpath(self._root)}/{name}":
            raise FileNotFoundError(errno.ENOENT, "a link, or a name that leads elsewhere", path)
        return path

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Context that raises `FileNotFoundError` for a missing file, and `ClusterError` for an unreachable directory.

        File systems raise various errors for both. Files in an unreachable directory may be intact, and must not be
        given up.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and (isinstance(error, _GONE) or error.errno == errno.EIO):
                raise FileNotFoundError(error.errno or errno.ENOENT, error.strerror or str(error)) from error
            raise ClusterError(
                f"checkpointDir {self.url} cannot be reached: {type(error).__name__}: {error}",
                hint="it must be a directory that every worker can read and write, with its credentials there",
                code="ST-CHECKPOINT-DIR",
            ) from error


def cannot_write(url: str, error: BaseException) -> tuple[str, str]:
    """Returns why a directory cannot be written, and a hint on what to do."""
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number) if number in (*_FULL, *_CLOSED) else f"{type(error).__name__}: {error}"
    if number in _FULL:
        hint = "make room there; a smaller keepCheckpoints or a larger checkpointInterval needs less"
    elif number in _CLOSED:
        hint = "make it writable for the user that the executors run as"
    else:
        hint = "it must be a directory that every worker can read and write, with its credentials there"
    return f"{url} cannot be written: {reason}", hint


def _blocks(content: bytes) -> Iterator[memoryview]:
    view = memoryview(content)
    for start in range(0, len(content), _WRITE_BYTES):
        yield view[start : start + _WRITE_BYTES]


def _put_local(target: Path, content: bytes, moved: Callable[[], object], *, new: bool) -> None:
    """Writes a local file under another name, and gives it its name once it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # The other name is random, so that nobody can have placed a link there.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            for block in _blocks(content):
                file.write(block)
                file.flush()
                _sync(file.fileno())  # A single sync at the end would block for a long time.
                moved()
        if new:
            _link_or_create(partial, target, content)
        else:
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)  # After a failure, this frees space on a full disk.
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        _sync(folder)  # So the new name survives a power failure, too.
    finally:
        os.close(folder)


def _link_or_create(partial: Path, target: Path, content: bytes) -> None:
    """Gives a written file its name, which must not exist yet.

    On a file system without hard links, the file is written once more; readers may see it before it is complete.
    """
    try:
        os.link(partial, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with target.open("xb") as file:
            file.write(content)


def _sync(descriptor: int) -> None:
    """Waits until a file is on its disk; a file system that knows no sync writes the file when it is closed."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


class Lease:
    """The right to write into a directory; its holder renews it every few seconds.

    A later attempt of the same fit takes the lease over from an earlier attempt, whose processes may still run. If the
    earlier attempt has checked the lease just before and renews it just afterwards, the later attempt takes it over
    again.
    """

    def __init__(self, directory: Directory, owner: str, attempt: str = "", restart: int = 0) -> None:
        """Acquires the lease for an attempt of a fit.

        `restart` is the number of earlier starts of the fit. The lease goes to the attempt with the largest number; if
        several have it, to the last of them. A `PersistenceError` says that another fit holds a lease that has not
        expired, or a later attempt of this fit holds the lease. Some file systems raise other exceptions than `OSError`
        when writing fails.
        """
        self._directory = directory
        self._owner = owner
        self._attempt = attempt
        self._restart = restart
        claim = claim_in(self._directory)
        if claim is None:
            with suppress(FileExistsError):
                self._write(new=True)
                return
            claim = claim_in(self._directory) or {}  # Another fit has acquired the lease meanwhile.
        if claim.get("owner") == owner and claim["restart"] > restart:
            raise self._lost(claim)
        age = time.time() - claim.get("time", 0)
        if claim.get("owner", owner) != owner and age < _CLAIM_SECONDS:
            raise PersistenceError(
                f"{directory.url} is being written by another fit, {age:.0f} s ago from {claim['host']}",
                hint="give each fit a directory of its own; if that fit is dead, try again in "
                f"{_CLAIM_SECONDS - age:.0f} s",
                param="checkpointDir",
                code="ST-CHECKPOINT-BUSY",
            )
        self._write()

    def renew(self) -> None:
        """Renews the lease; a `PersistenceError` says that another fit, or a later attempt of this fit, holds it."""
        self.check()
        self._write()

    def check(self) -> None:
        """Raises a `PersistenceError` if another fit, or a later attempt of this fit, holds the lease."""
        claim = claim_in(self._directory)
        if not claim or (claim["owner"], claim["attempt"]) == (self._owner, self._attempt):
            return
        if claim["owner"] != self._owner or claim["restart"] >= self._restart:
            raise self._lost(claim)

    def _lost(self, claim: dict[str, Any]) -> PersistenceError:
        return PersistenceError(
            f"{self._directory.url} was taken by another fit from {claim['host']}, or by a later attempt of this "
            f"one, while it had not said for {_CLAIM_SECONDS:.0f} s that it writes there",
            hint="give each fit a directory of its own",
            param="checkpointDir",
            code="ST-CHECKPOINT-BUSY",
        )

    def _write(self, *, new: bool = False) -> None:
        claim = {
            "owner": self._owner,
            "attempt": self._attempt,
            "restart": self._restart,
            "time": time.time(),
            "host": socket.gethostname(),
        }
        self._directory.put(CLAIM, json.dumps(claim).encode(), new=new)


def claim_in(directory: Directory) -> dict[str, Any] | None:
    """Returns who holds the lease on a directory; `None` if nobody does, an empty dict if it cannot be read."""
    try:
        claim = json.loads(directory.read(CLAIM))
        return {
            "owner": str(claim["owner"]),
            "attempt": str(claim["attempt"]),
            "host": str(claim["host"]),
            "restart": int(claim["restart"]),
            "time": float(claim["time"]),
        }
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        return {}
