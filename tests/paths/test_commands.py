"""What users type: the doctor and `run`, in a shell of its own, from spark-submit, and over Spark Connect."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

from tests.support.programs import ROOT, SPARK_HOME, connect_port, environment, run_python

SCRIPT = """
import os, sys
print(f"{sys.argv[1:]} of rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
"""

# What pages take as given: a session, rows, and a module in a file.
DIGITS = """
from pathlib import Path

Path("nets.py").write_text(
    "from torch import nn\\n"
    "class Net(nn.Sequential):\\n"
    "    def __init__(self):\\n"
    "        super().__init__(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))\\n"
)
from nets import Net
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

spark = SparkSession.builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
rows = [(x.tolist(), int(y), i % 5 == 0) for i, (x, y) in enumerate(zip(*load_digits(return_X_y=True)))][:400]
df = spark.createDataFrame(rows, "features array<float>, label int, held_out boolean")
"""

# What the whole port from Horovod takes as given.
AGES = """
Path("ages.py").write_text(
    "from torch import nn\\n"
    "class Net(nn.Module):\\n"
    "    def __init__(self, hidden):\\n"
    "        super().__init__()\\n"
    "        self.pixels = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 1))\\n"
    "        self.age = nn.Linear(1, 1)\\n"
    "    def forward(self, age, image):\\n"
    "        return self.pixels(image) + self.age(age.reshape(-1, 1))\\n"
)
from ages import Net

rows = [(i, i % 90, [i / 200] * 784, i / 200, 1.0) for i in range(200)]
df = spark.createDataFrame(rows, "id long, age int, image array<float>, label float, weight float")
"""


def test_a_doctor_under_spark_submit_checks_the_session_of_the_submission(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[2]", "--conf", "spark.speculation=true"),
            *("--conf", "spark.dynamicAllocation.enabled=true"),  # neither is there in local mode
            *(str(ROOT / "jobs" / "doctor.py"), "--num-workers", "3", "--timeout", "200", "--json"),
        ],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert (report["status"], report["master"]) == ("failure", "local[2]")
    found = {one["check"]: one for one in report["findings"]}
    assert [check for check, one in found.items() if one["status"] != "ok"] == ["slots"]
    assert found["speculation"]["found"] == "speculation is on, and Spark has none in local mode"
    assert found["slots"]["found"] == "numWorkers=3, but the cluster has 2 slots"


def test_the_doctor_sees_through_a_connect_server(tmp_path: Path) -> None:
    with connect_port():
        out = run_python(
            tmp_path,
            *("-m", "sparktorch", "doctor", "--remote", "local[2]", "--num-workers", "2", "--timeout", "150"),
            *("--checkpoint-dir", str(tmp_path / "checkpoints"), "--json"),
        )
    report = json.loads(out)
    assert (report["status"], report["master"]) == ("ok", "local[2]")
    said = {one["check"]: one["found"] for one in report["findings"]}
    assert said["slots"] == "2, of which 2 are needed"
    assert said["driver-reachable"] == "from all executors (1), on a socket of this job"
    assert "2 tasks wrote, read and deleted a file" in said["checkpoint-dir"]


def test_run_takes_its_options_before_and_after_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ("-m", "sparktorch", "run", "--master", "local[2]", "script.py", "--lr", "0.1", "data", "--workers", "2")
    out = run_python(tmp_path, *command, "--", "--workers", "7")
    for rank in range(2):
        assert f"['--lr', '0.1', 'data', '--workers', '7'] of rank {rank} of 2" in out


def test_a_plan_of_a_job_file_says_what_fits(tmp_path: Path) -> None:
    out = run_python(
        tmp_path,
        *("-m", "sparktorch", "plan", str(ROOT / "conf" / "digits.yaml"), "--master", "local[1]"),
        *("--workers", "4", "--memory", "3.5"),
        path=str(ROOT / "jobs"),
    )
    assert "4 workers, 32 rows of each at a time" in out
    fits = {
        line.split("  ")[0]: line.rpartition("  ")[2] for line in out.splitlines() if line.endswith(("fits", "large"))
    }
    assert (fits["ddp"], fits["zero3"]) == ("too large", "fits")
    assert "no strategy fits" not in out


def code_of(*pages: str) -> list[str]:
    texts = [(ROOT / "docs" / page).read_text() for page in pages]
    return [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


def test_the_code_of_the_first_page_runs_as_it_stands(tmp_path: Path) -> None:
    program = tmp_path / "start.py"
    program.write_text("\n".join(code_of("start.md")))
    out = run_python(tmp_path, str(program))
    accuracy, *_, last = [line for line in out.splitlines() if line]
    assert float(accuracy) > 0.9
    assert ast.literal_eval(last)["epoch"] == 5


def test_our_side_of_the_pages_for_those_who_come_from_elsewhere_runs(tmp_path: Path) -> None:
    pages = [f"moving/{path.name}" for path in sorted((ROOT / "docs" / "moving").glob("*.md"))]
    program = tmp_path / "moved.py"
    blocks = code_of(*pages)
    of_ages = [block for block in blocks if '"age"' in block]
    of_digits = [block for block in blocks if block not in of_ages]
    program.write_text(
        "\n".join([DIGITS, *of_digits, AGES, *of_ages, "print('moved')"])
        .replace("/mnt/shared", str(tmp_path))
        .replace("numWorkers=8", "numWorkers=2")  # the slots that there are
    )
    assert run_python(tmp_path, str(program)).splitlines()[-1] == "moved"
