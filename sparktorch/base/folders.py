"""The files in a folder, as the key of what was read from them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["stamp"]


def stamp(folder: str) -> tuple[tuple[str, int], ...]:
    """Returns the files of a folder, and when they were written, in nanoseconds."""
    return tuple(sorted((file.name, file.stat().st_mtime_ns) for file in Path(folder).iterdir()))
