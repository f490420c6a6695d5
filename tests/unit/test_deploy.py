"""What people read and deploy with: job files, manifests, the README's figures, the site, and the notebooks."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml

import sparktorch
from sparktorch import TabularClassifier, TorchClassifier, errors, tracking
from sparktorch.cli.job_file import read_job
from tests.support.notebooks import NOTEBOOKS, RUNNER, assert_it_answers
from tests.support.programs import ROOT

CONF = ROOT / "conf"
FILES = ("kubernetes.yaml", "sparkapplication.yaml")
MANIFESTS: list[dict[str, Any]] = [one for file in FILES for one in yaml.safe_load_all((CONF / file).read_text())]
APPLICATION = MANIFESTS[-1]["spec"]


def test_the_job_files_of_the_first_page_can_be_read(tmp_path: Path) -> None:
    text, of_table = re.findall(r"```yaml\n(name: .+?)```", (ROOT / "docs" / "start.md").read_text(), re.DOTALL)
    (tmp_path / "job.yaml").write_text(text)
    job = read_job(tmp_path / "job.yaml")
    assert isinstance(job.estimator.build(), TorchClassifier)
    assert (job.data.format, job.data.options) == ("csv", {"header": True})
    (tmp_path / "job.yaml").write_text(of_table)
    assert isinstance(read_job(tmp_path / "job.yaml").estimator.build(), TabularClassifier)


def settings() -> dict[str, str]:
    """The lines of the file for spark-submit on Kubernetes, whose names `configparser` writes in small letters."""
    parser = configparser.ConfigParser(delimiters=" ", strict=True)
    parser.read_string("[spark]\n" + (CONF / "spark-defaults-kubernetes.conf").read_text())
    return dict(parser["spark"])


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in MANIFESTS if one["kind"] == kind}


def test_the_list_for_environments_to_which_spark_brings_its_own_is_that_of_the_package_but_pyspark() -> None:
    listed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    needed = re.findall(r'"(.+?)"', listed[1])
    given = [line for line in (CONF / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert given == [one for one in needed if not one.startswith("pyspark")]


def test_the_job_of_the_manifest_can_be_read_and_has_as_many_slots_as_it_asks_for(tmp_path: Path) -> None:
    (name,) = APPLICATION["arguments"]
    (mount,) = APPLICATION["driver"]["volumeMounts"]
    (volume,) = [one for one in APPLICATION["volumes"] if one["name"] == mount["name"]]
    (file,) = of_kind("ConfigMap")[volume["configMap"]["name"]]["data"].items()
    assert name == f"{mount['mountPath']}/{file[0]}"
    (tmp_path / "job.yaml").write_text(file[1])
    job = read_job(tmp_path / "job.yaml")
    assert isinstance(job.estimator.build(), TorchClassifier)
    cores = APPLICATION["executor"]["instances"] * APPLICATION["executor"]["cores"]
    assert job.estimator.params["numWorkers"] == cores // int(APPLICATION["sparkConf"]["spark.task.cpus"])
    assert APPLICATION["driver"]["serviceAccount"] in of_kind("ServiceAccount")


def test_the_lines_for_a_volume_without_internet_are_lines_of_the_manifest() -> None:
    text = (CONF / "sparkapplication.yaml").read_text()
    *_, whole = yaml.safe_load_all(text.replace("#+ ", ""))
    spec, shared = whole["spec"], {"name": "shared", "mountPath": "/mnt/shared"}
    assert [one["name"] for one in spec["volumes"]] == ["job", "spark-local-dir-1", "shared"]
    for role in ("driver", "executor"):
        assert shared in spec[role]["volumeMounts"]
        assert spec[role]["podSecurityContext"] == {"fsGroup": 185, **APPLICATION[role].get("podSecurityContext", {})}
        assert {"name": "HF_HUB_OFFLINE", "value": "1"} in spec[role]["env"]
    assert spec["imagePullSecrets"] == ["registry"]


def test_the_policies_open_the_ports_that_the_application_listens_on_and_no_others() -> None:
    policies = of_kind("NetworkPolicy")
    assert opened(policies["sparktorch-drivers"]) == {
        tuple(int(APPLICATION["sparkConf"][f"spark.driver.{name}"]) for name in ("port", "blockManager.port")),
        tuple(int(port) for port in APPLICATION["driver"]["env"][0]["value"].split("-")),
    }
    block_manager = int(APPLICATION["sparkConf"]["spark.blockManager.port"])
    (kernel,) = APPLICATION["executor"]["podSecurityContext"]["sysctls"]
    assert opened(policies["sparktorch-executors"]) == {
        (block_manager, block_manager),
        tuple(int(port) for port in kernel["value"].split()),
    }


def test_one_set_of_policies_serves_the_operator_and_spark_submit() -> None:
    given, template = settings(), yaml.safe_load((CONF / "kubernetes-pod.yaml").read_text())
    for role in ("driver", "executor"):
        selected = of_kind("NetworkPolicy")[f"sparktorch-{role}s"]["spec"]["podSelector"]["matchLabels"]
        assert selected == APPLICATION[role]["labels"] | {"spark-role": role}
        assert selected["sparktorch"] == given[f"spark.kubernetes.{role}.label.sparktorch"]
        assert given[f"spark.kubernetes.{role}.podtemplatefile"] == "conf/kubernetes-pod.yaml"
    assert template["spec"]["securityContext"]["sysctls"] == APPLICATION["executor"]["podSecurityContext"]["sysctls"]
    ports = {name.lower(): port for name, port in APPLICATION["sparkConf"].items() if name.endswith(".port")}
    assert {name: given[name] for name in ports} == ports
    assert given["spark.kubernetes.driverenv.sparktorch_ports"] == APPLICATION["driver"]["env"][0]["value"]


def opened(policy: dict[str, Any]) -> set[tuple[int, ...]]:
    (rule,) = policy["spec"]["ingress"]
    return {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}


def test_the_image_holds_the_script_that_the_application_runs_and_the_python_that_spark_starts() -> None:
    lines = (CONF / "Dockerfile").read_text()
    copied = dict(re.findall(r"^COPY (\S+) (\S+)$", lines, re.MULTILINE))
    script = APPLICATION["mainApplicationFile"].removeprefix("local://")
    assert (ROOT / "jobs" / script.removeprefix(copied["jobs"] + "/")).exists()
    assert all((ROOT / source).exists() for source in copied)
    context = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    sources = [source for given in re.findall(r"^COPY ([^-].+) \S+$", lines, re.MULTILINE) for source in given.split()]
    assert {source.split("/")[0].rstrip("*") for source in sources} <= set(context)
    given = settings()
    assert f"PYSPARK_PYTHON={given['spark.pyspark.python']}" in lines
    assert given["spark.executor.resource.gpu.discoveryscript"] == copied["conf/gpu_discovery.sh"]
    assert given["spark.kubernetes.container.image"] == APPLICATION["image"]


def test_the_pipeline_runs_the_two_commands_of_the_readme_on_the_pythons_of_the_package() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    job, oldest = jobs["demo-and-test"], jobs["wheel"]["steps"][1]["with"]["python-version"]
    commands = re.findall(r"^(make \w+)\s+#", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [step["run"] for step in job["steps"] if "run" in step] == commands == ["make demo", "make test"]
    assert f'requires-python = ">={oldest}"' in (ROOT / "pyproject.toml").read_text()
    assert f"Python {job['strategy']['matrix']['python'][0]} or newer with `venv`" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("benchmark", "ratio", "said"),
    [
        ("fit_wall", "fit / torchrun", "{:.2f} of the time of torchrun"),
        ("fit_wall", "fit / TorchDistributor", "{:.2f} of TorchDistributor's"),
        (
            "fit_wall",
            "cold fit / torchrun, each with its session",
            "with its session, takes {:.2f} of torchrun with one",
        ),
        ("checkpoint", "epoch with saving / without", "saving makes an epoch {:.3f} times as long"),
    ],
)
def test_a_figure_of_the_readme_is_that_of_its_benchmark(benchmark: str, ratio: str, said: str) -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / f"{benchmark}.json").read_text())["ratios"][ratio]
    assert said.format(found) in (ROOT / "README.md").read_text()


REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
LISTED = {name.rsplit(".")[-1] for name in re.findall(r"\.\. auto\w+:: ([\w.]+)", REFERENCE)}
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("name", [*sparktorch.__all__, *tracking.__all__])
def test_a_public_name_is_in_the_reference(name: str) -> None:
    index = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert name == "__version__" or (name in LISTED and f"`{name}`" in index)


def test_every_exception_is_in_the_reference() -> None:
    raised = {name for name in errors.__all__ if isinstance(getattr(errors, name), type) and name.endswith("Error")}
    assert raised <= LISTED


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_in_the_navigation(page: str) -> None:
    texts = [REFERENCE, *((ROOT / "docs" / f"{each}.md").read_text() for each in PAGES)]
    trees = [tree for text in texts for tree in re.findall(r"```\{toctree\}.*?```", text, re.DOTALL)]
    named = {line.strip().removeprefix("../") for tree in trees for line in tree.splitlines()}
    assert page in {"index", *named}


SHORT = {
    *("elsewhere", "embeddings", "hybrid", "images", "language_model", "lora", "pictures", "recommendations"),
    *("resnet", "series", "streaming", "tables", "text"),
}
MOST_LINES = 25


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_with_the_outputs_of_its_code(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.get("outputs_of") == RUNNER["digest"](notebook), "scripts/notebooks.py runs and stores it"
    assert_it_answers(path, notebook)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert "?" in texts[0]
    assert "What to change:" in texts[-1]
    stored = path.read_text()
    assert not [word for word in ("/tmp/", "/home/", "/root/", "/work/") if word in stored]
    lines = [line for cell in RUNNER["code_of"](notebook) for line in cell.source.splitlines() if line.strip()]
    assert path.stem not in SHORT or len(lines) <= MOST_LINES
