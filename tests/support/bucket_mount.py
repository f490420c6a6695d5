"""A folder mounted as object stores are, by FUSE: no hard links, no renames of folders with files, files in one go.

It serves the kernel's protocol itself, from a process of its own: whoever uses the mount waits for that process. Writes
that do not append, and sizes that are set before bytes are there, are refused, as on Databricks' volumes; folders that
hold something are not renamed, as by gcsfuse.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_IN = struct.Struct("<IIQQIII4x")
_OUT = struct.Struct("<IiQ")
_WRITE = 1 << 17
_SIZE = 1 << 3  # the bit of FUSE_SETATTR that sets the size


def _refused(number: int) -> OSError:
    """Returns the error of what this file system does not do."""
    return OSError(number, os.strerror(number))


class _Bucket:
    """Answers the kernel's requests from a folder; a node is a path, by its number."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._paths, self._nodes = {1: ""}, {"": 1}
        self._files: dict[int, int] = {}
        self.calls: dict[int, Callable[[int, bytes], bytes]] = {
            1: lambda node, body: self._entry(self._below(node, body)),  # LOOKUP
            3: lambda node, _: self._attributes(self._paths[node]),
            4: self._set_attributes,
            9: self._make_folder,
            10: lambda node, body: os.unlink(self._at(self._below(node, body))) or b"",
            11: lambda node, body: os.rmdir(self._at(self._below(node, body))) or b"",
            12: lambda node, body: self._rename(node, body[8:], struct.unpack_from("<Q", body)[0]),
            14: lambda node, body: self._opened(self._paths[node], struct.unpack_from("<I", body)[0]),
            15: self._read,
            16: self._write,
            17: lambda *_: struct.pack("<5Q4I24x", 1 << 30, 1 << 29, 1 << 29, 1 << 20, 1 << 19, 4096, 255, 4096, 0),
            18: self._close,
            25: lambda *_: b"",  # FLUSH
            26: self._begin,
            27: lambda *_: bytes(16),  # OPENDIR
            28: self._list,
            29: lambda *_: b"",
            35: self._create,
            45: lambda node, body: self._rename(node, body[16:], struct.unpack_from("<Q", body)[0]),
        }

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, _WRITE + 4096)
            except OSError:  # unmounted
                return
            _, code, unique, node, *_ = _IN.unpack_from(request)
            if code in (2, 42):  # FORGET wants no answer
                continue
            number, answer = 0, b""
            try:
                if code not in self.calls:
                    raise _refused(errno.ENOSYS)
                answer = self.calls[code](node, request[_IN.size :])
            except OSError as error:
                number = error.errno or errno.EIO
            os.write(device, _OUT.pack(_OUT.size + len(answer), -number, unique) + answer)

    def _at(self, path: str) -> str:
        return f"{self._folder}/{path}"

    def _below(self, node: int, name: bytes) -> str:
        return f"{self._paths[node]}/{name.partition(bytes(1))[0].decode()}".lstrip("/")

    def _stat(self, path: str) -> bytes:
        found = os.lstat(self._at(path))
        times = [int(found.st_atime), int(found.st_mtime), int(found.st_ctime)]
        node = self._nodes.get(path, 1)
        owner = [found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0]
        return struct.pack("<6Q10I", node, found.st_size, found.st_blocks, *times, 0, 0, 0, *owner)

    def _attributes(self, path: str) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._stat(path)

    def _entry(self, path: str) -> bytes:
        os.lstat(self._at(path))
        node = self._nodes.setdefault(path, max(self._paths) + 1)
        self._paths[node] = path
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + self._stat(path)

    def _begin(self, _: int, body: bytes) -> bytes:
        _, _, ahead, _ = struct.unpack_from("<4I", body)
        return struct.pack("<4IHHIIHHI28x", 7, 31, ahead, 1 << 5, 12, 10, _WRITE, 1, 0, 0, 0)

    def _set_attributes(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        path = self._paths[node]
        if valid & _SIZE:
            if size > os.stat(self._at(path)).st_size:
                raise _refused(errno.EOPNOTSUPP)
            os.truncate(self._at(path), size)
        return self._attributes(path)

    def _make_folder(self, node: int, body: bytes) -> bytes:
        path = self._below(node, body[8:])
        os.mkdir(self._at(path))
        return self._entry(path)

    def _rename(self, node: int, names: bytes, folder: int) -> bytes:
        old, new, _ = names.split(bytes(1), 2)
        source, target = self._below(node, old), self._below(folder, new)
        if os.path.isdir(self._at(source)) and os.listdir(self._at(source)):
            raise _refused(errno.EMFILE)
        os.rename(self._at(source), self._at(target))
        moved = self._nodes.pop(source, None)
        if moved is not None:
            self._nodes[target], self._paths[moved] = moved, target
        return b""

    def _opened(self, path: str, flags: int) -> bytes:
        file = os.open(self._at(path), flags & (os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_TRUNC), 0o644)
        self._files[file] = file
        return struct.pack("<QII", file, 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        path = self._below(node, body[16:])
        opened = self._opened(path, struct.unpack_from("<I", body)[0] | os.O_CREAT)
        return self._entry(path) + opened

    def _read(self, _: int, body: bytes) -> bytes:
        file, start, size = struct.unpack_from("<QQI", body)
        return os.pread(file, size, start)

    def _write(self, _: int, body: bytes) -> bytes:
        file, start, size = struct.unpack_from("<QQI", body)
        if start != os.fstat(file).st_size:
            raise _refused(errno.EOPNOTSUPP)
        return struct.pack("<II", os.pwrite(file, body[40 : 40 + size], start), 0)

    def _close(self, _: int, body: bytes) -> bytes:
        os.close(self._files.pop(struct.unpack_from("<Q", body)[0]))
        return b""

    def _list(self, node: int, body: bytes) -> bytes:
        _, start, size = struct.unpack_from("<QQI", body)
        answer = b""
        for place, name in enumerate(sorted(os.listdir(self._at(self._paths[node])))):
            entry = struct.pack("<QQII", place + 2, place + 1, len(name.encode()), 0) + name.encode()
            entry += bytes(-len(entry) % 8)
            if place < start:
                continue
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer


def _serve(device: int, folder: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a program that is killed leaves no server
    _Bucket(folder).serve(device)


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """Yields the path of a mount whose files lie in a folder beside it; needs /dev/fuse and the right to mount."""
    store, mount = folder / "store", folder / "mount"
    store.mkdir()
    mount.mkdir()
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,default_permissions"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"bucket", bytes(mount), b"fuse.bucket", 0, options.encode()):
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    server = multiprocessing.get_context("fork").Process(target=_serve, args=(device, str(store)), daemon=True)
    server.start()
    os.close(device)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
        server.join(10)
        server.kill()
