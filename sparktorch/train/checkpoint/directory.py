"""A directory on any file system that fsspec knows, and files in it that are there as a whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparktorch.errors import ClusterError, PersistenceError

__all__ = ["Directory", "cannot_write"]

# A file that is not there, or of which the disk has lost a part: the file is to blame, not the way to it.
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_READ_BYTES = 4 << 20  # at once
_WRITE_BYTES = 64 << 20


class Directory:
    """Files by their names under one URL; a name may have a folder in it, and leads nowhere else.

    Attributes:
        url: As the user gave it.
        is_local: Whether its files are local ones.
    """

    def __init__(self, url: str, moved: Callable[[], object] = lambda: None) -> None:
        """Opens the directory, which need not exist.

        Args:
            url: Of the directory.
            moved: Called for every few MB of a file that have been read or written.

        Raises:
            PersistenceError: The file system is unknown, or its package is not installed.
        """
        import fsspec  # which only those who save have to wait for
        from fsspec.implementations.local import LocalFileSystem

        self.url, self._moved = url, moved
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise PersistenceError(f"checkpointDir {url!r} cannot be opened: {error}", param="checkpointDir") from error
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self._root = root.rstrip("/")

    def put(self, name: str, content: bytes, *, new: bool = False) -> None:
        """Writes a file that is there as a whole or not at all, in place of the one of that name.

        A file of more than 64 MB may be cut off where writing it fails on another file system than the local one.

        Args:
            name: Of the file; its folder is made.
            content: Of the file.
            new: Refuse to replace one. Where a file system cannot promise that, it may be replaced all the same.

        Raises:
            FileExistsError: There is one, and `new` is set.
            OSError: It cannot be written; file systems have errors of their own besides.
        """
        path = self._path(name)
        if self.is_local:
            _put_local(Path(path), content, self._moved, new=new)
        elif len(content) > _WRITE_BYTES:
            # Cut off where it fails, which a manifest tells: those are small, and not written in parts.
            with self._fs.open(path, "wb") as file:
                for block in _blocks(content):
                    file.write(block)
                    self._moved()
        elif not new or not self._create(path, content):
            self._fs.pipe_file(path, content)

    def read(self, name: str) -> bytes:
        """Returns the content of a file.

        Raises:
            FileNotFoundError: There is none.
            ClusterError: The directory cannot be reached.
        """
        with self._reaching():
            content: bytes = self._fs.cat_file(self._path(name))
            return content

    def read_part(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes of a file from `start` to before `end`; raises what `read` does."""
        with self._reaching():
            content: bytes = self._fs.cat_file(self._path(name), start=start, end=end)
            self._moved()
            return content

    def measure(self, name: str) -> dict[str, Any]:
        """Returns size in bytes and SHA-256 of a file; raises what `read` does."""
        digest, size = hashlib.sha256(), 0
        with self._reaching(), self._fs.open(self._path(name), "rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                size += len(block)
                self._moved()
        return {"bytes": size, "sha256": digest.hexdigest()}

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name; raises `ClusterError` as `read` does."""
        with self._reaching():
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._path(name)))

    def names(self) -> list[str]:
        """Returns the names of files and folders; none where the directory does not exist.

        Raises:
            ClusterError: The directory cannot be reached.
        """
        with self._reaching():
            self._fs.invalidate_cache()
            if not self._fs.isdir(self._root):
                return []
            return [path.rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)]

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all that is in it; of a link, the link."""
        folder, _, last = name.rpartition("/")
        with suppress(FileNotFoundError):
            path = f"{self._path(folder) if folder else self._root}/{last}"
            if self.is_local and os.path.islink(path):
                os.unlink(path)
            else:
                self._fs.rm(path, recursive=True)

    def fetch(self, name: str, target: Path) -> None:
        """Makes a file available under a local path, where there is nothing yet; raises what `read` does."""
        from fsspec.callbacks import Callback

        path = self._path(name)
        with self._reaching():
            if self.is_local:
                target.symlink_to(path)
            else:
                self._fs.get_file(path, str(target), callback=Callback(hooks={"moved": lambda *_: self._moved()}))

    def _create(self, path: str, content: bytes) -> bool:
        """Writes a file that is not there yet; returns whether the file system knows how to make sure of that."""
        try:
            self._fs.pipe_file(path, content, mode="create")
        except FileExistsError:
            raise
        except Exception:  # whatever else is wrong is wrong with writing it plainly, too
            return False
        return True

    def _path(self, name: str) -> str:
        """Returns the path of a file.

        Raises:
            FileNotFoundError: A link in the directory leads elsewhere: what it leads to is none of its files.
        """
        path = f"{self._root}/{name}"
        if self.is_local and os.path.realpath(path) != f"{os.path.realpath(self._root)}/{name}":
            raise FileNotFoundError(errno.ENOENT, "a link, or a name that leads elsewhere", path)
        return path

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Tells files that are missing from a directory that cannot be reached.

        Whatever file systems raise besides: of the latter nothing follows for the files, which must not be given up.
        """
        try:
            yield
        except _GONE as error:
            raise FileNotFoundError(error.errno or errno.ENOENT, error.strerror or str(error)) from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EIO:
                raise FileNotFoundError(errno.EIO, f"it cannot be read: {error}") from error
            raise ClusterError(
                f"checkpointDir {self.url} cannot be reached: {type(error).__name__}: {error}",
                hint="it must be a directory that every worker can read and write, with its credentials there",
            ) from error


def cannot_write(url: str, error: BaseException) -> tuple[str, str]:
    """Returns why nothing can be written to a directory, and what to do about it."""
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
    target.parent.mkdir(parents=True, exist_ok=True)
    # A name that nobody can have foreseen, and no link planted at.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            for block in _blocks(content):
                file.write(block)
                file.flush()
                os.fsync(file.fileno())  # or all that is in the page cache is waited for at the end
                moved()
        if new:
            os.link(partial, target)
            partial.unlink()
        else:
            partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)  # on a full disk above all
        raise
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name, too, outlives a power cut
    finally:
        os.close(directory)
