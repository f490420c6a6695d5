"""A user's machine: Pythons with and without the package, a project folder, and a shell with nothing else set."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.support.programs import BRIEF_JVM, ROOT

_INHERITED = ("HOME", "JAVA_HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")


@dataclass(frozen=True)
class Pythons:
    """Two interpreters that share what is installed here."""

    driver: Path
    executor: Path


def pythons(folder: Path) -> Pythons:
    """Makes two virtual environments over the packages of this one."""
    sites = [path for path in sys.path if path.endswith("site-packages")]  # a version of Spark lies over the others
    found = {}
    for name, paths in (("driver", [*sites, str(ROOT)]), ("executor", sites)):
        home = folder / name
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        own = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
        Path(own, "shared.pth").write_text("".join(f"{path}\n" for path in paths))
        found[name] = home / "bin" / "python"
    for name, code in (("driver", 0), ("executor", 1)):
        done = subprocess.run([found[name], "-c", "import sparktorch"], env=shell(), cwd=folder, capture_output=True)
        assert done.returncode == code, done.stderr
    return Pythons(**found)


def package_zip(folder: Path) -> Path:
    """Makes the zip that travels to executors, as `make zip` does."""
    path = folder / "sparktorch.zip"
    subprocess.run([sys.executable, ROOT / "scripts" / "package.py", path], check=True)
    return path


def shell(python: Path | None = None, **more: str) -> dict[str, str]:
    """The environment of a shell on loopback in which one Python is active, and nothing of this test's own."""
    path = os.pathsep.join([*([str(python.parent)] if python else []), os.defpath, os.environ.get("PATH", "")])
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    own = {"SPARK_LOCAL_IP": "127.0.0.1", "MLFLOW_DISABLE_TELEMETRY": "true", "JAVA_TOOL_OPTIONS": BRIEF_JVM}
    return {**kept, "PATH": path, **own, **more}
