"""The files in a folder, as the key of what was read from them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["stamp"]


def stamp(folder: str) -> tuple[tuple[str, int], ...]:
    """Returns the files of a folder, and when they were written, in nanoseconds."""
    return tuple(sorted((file.name, _written(file)) for file in Path(folder).iterdir()))


def _written(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:  # of a link that leads nowhere, which whoever reads it will miss
        return 0
