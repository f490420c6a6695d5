"""Walks the cells, one program a master, when the first of a master's cells asks for it."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.paths.cells import Cell
from tests.support.programs import SPARK_HOME, connect_port
from tests.support.standalone import on_loopback
from tests.support.users import Pythons, package_zip, pythons, shell

_HERE = Path(__file__).parent
_SECONDS = 2400
_URLS = {"local": "local[2]", "local-cluster": "local-cluster[2,1,1024]", "connect": "connect:local[2]"}


@dataclass
class Walks:
    """The programs of all masters, each run once; `local` first, whose models the others load."""

    folder: Path
    pythons: Pythons
    cells: list[Cell]

    def __post_init__(self) -> None:
        """Lays out the project: its programs and modules, and the folder that the masters share."""
        self._done: dict[str, dict[str, Any]] = {}
        self._shared = self.folder / "shared"
        self._shared.mkdir()
        self._package = package_zip(self.folder)

    def result(self, master: str, name: str) -> Any:
        """Returns what came of a cell or step: the error, or `None`."""
        if master != "local":
            self._results("local")
        results = self._results(master)
        assert name in results, f"the program on {master} ended before it:\n{results['']}"
        return results[name]

    def _results(self, master: str) -> dict[str, Any]:
        if master not in self._done:
            folder = self.folder / master
            shutil.copytree(_HERE / "programs", folder)
            shutil.copy(_HERE / "user" / "nets.py", folder)
            errors = self._run(master, folder)
            results = folder / "results"
            lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
            self._done[master] = {line["name"]: line["error"] for line in lines} | {"": errors[-4000:]}
        return self._done[master]

    def _run(self, master: str, folder: Path) -> str:
        """Runs the program in the folder where its modules are if they lie beside the executors, else in another."""
        wanted = ["-".join(cell[1:]) for cell in self.cells if cell.master == master]
        walk = [str(folder / "walk.py"), "--shared", str(self._shared), "--results", str(folder / "results")]
        python = self.pythons.driver
        workspace, env = folder / "elsewhere", {"PYSPARK_PYTHON": str(self.pythons.executor)}
        package, module = str(self._package), str(folder / "nets.py")
        with ExitStack() as stack:
            if master == "local":
                shutil.copy(_HERE / "user" / "private.py", folder)
                workspace, env, command = folder, {}, [str(python), *walk]
            elif master == "standalone":
                url = stack.enter_context(on_loopback(self.folder, shell(python)))
                env["PYSPARK_DRIVER_PYTHON"] = str(python)
                submit = str(SPARK_HOME / "bin" / "spark-submit")
                command = [submit, "--master", url, "--py-files", f"{package},{module}", *walk]
            else:
                if master == "connect":
                    stack.enter_context(connect_port())
                command = [str(python), *walk, "--package", package, "--module", module]
            workspace.mkdir(exist_ok=True)
            with (folder / "errors").open("wb+") as errors:
                try:
                    subprocess.run(
                        [*command, "--master", _URLS.get(master, ""), *wanted],
                        env=shell(python, **env),
                        cwd=workspace,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                        timeout=_SECONDS,
                        check=False,
                    )
                except subprocess.TimeoutExpired:
                    errors.write(f"\nended after {_SECONDS} s".encode())  # what it has walked by then counts
        return (folder / "errors").read_text(errors="replace")


@pytest.fixture(scope="session")
def walks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Walks:
    folder = tmp_path_factory.mktemp("paths")
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    return Walks(folder, pythons(folder), [param["cell"] for param in params if "cell" in param])
