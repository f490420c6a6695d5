"""What tests of checkpoints share: a file system that a test can hold up, and the end of what is being saved."""

from __future__ import annotations

import threading
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem

from sparktorch.train.checkpoint.store import CheckpointStore


class LocalFiles(DirFileSystem):
    """The local files, as a file system of its own; to derive one from that does more."""

    def __init__(self, **options: Any) -> None:
        """Takes the options of any file system of fsspec."""
        super().__init__(path="/", target_protocol="file", target_options={"auto_mkdir": True}, **options)


class Counted(LocalFiles):
    """The local files; counts the bytes that are read."""

    protocol = "counted"
    read = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        content: bytes = super().cat_file(path, start=start, end=end, **options)
        Counted.read += len(content)
        return content


fsspec.register_implementation("counted", Counted, clobber=True)


def saved_steps(store: CheckpointStore) -> list[int]:
    """Returns the steps of which a store has folders, latest first."""
    folders = [name for name in store.directory.names() if name.startswith("step-")]
    return sorted({int(name.split("-")[1]) for name in folders}, reverse=True)


def wait_for_saves() -> None:
    """Waits until the savers of this process have written what they have begun to."""
    for thread in threading.enumerate():
        if thread.name == "sparktorch-save":
            thread.join(30)
            assert not thread.is_alive()
