"""What mypy and editors read of the Params in the stubs, where `Unpack` of TypedDicts types the constructors."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules

import pytest

from sparktorch import tasks
from sparktorch.ml.params import mixins

pytestmark = pytest.mark.newest

MODULES = [mixins, *(import_module(f"sparktorch.tasks.{task.name}.params") for task in iter_modules(tasks.__path__))]
# All but the stubs and what they are built on is `Any` here: mypy then takes seconds, and reads the same signatures.
READ = [module.__name__ for module in MODULES]
READ += ["sparktorch.tasks.shared.param_types", "pyspark.ml.param.*", "pyspark.ml.util"]
CONFIG = f"""
[mypy]
strict = true
follow_imports = skip
[mypy-{",".join(READ)}]
follow_imports = normal
"""
IMPORTS = "\n".join(
    ["from typing import Any", *(f"from {module.__name__} import *" for module in MODULES), "anything: Any = 3"]
)
ACCEPTED = """
GenericParams(loss=None, groupCol="query", outputCols=["a", "b"], scheduler=None, inputShapes={"a": [2, 2]})
ClassifierParams(epochs=3, learningRate=0.1, classWeights="balanced", numWorkers=(1, 2), inputCols=["a"])
RegressorParams(labelCols=["a"], checkpointDir=None, **{"epochs": anything})
TabularClassifierParams(epochs="auto", categoricalCols=["a"], seed=3)
RankerParams(loss=lambda scores, labels, sizes: scores, epochs=3)
ClassifierParams().setEpochs(3).setFeaturesCol("a").setProbabilityCol("b").setSeed(3)
TabularClassifierParams().setEpochs("auto").setMinCount(3)
RankingModelParams().setGroupCol("query").setPredictBatchSize("auto").setLabelCol("label")
"""
REFUSED = {
    "ClassifierParams(epoch=3)": 'Unexpected keyword argument "epoch"',
    'ClassifierParams(epochs="auto")': 'Argument "epochs" .* has incompatible type "str"; expected "int"',
    'ClassifierParams(inputCols="a")': r'Argument "inputCols" .* expected "list\[str\] \| None"',
    "ClassifierParams(print)": "Too many positional arguments",
    "TabularClassifierParams(epochs=0.5)": r'Argument "epochs" .* expected "int \| str"',
    'TabularClassifierParams(featuresCol="a")': 'Unexpected keyword argument "featuresCol"',
    'TextClassifierParams(inputCols=["a"])': 'Unexpected keyword argument "inputCols"',
    'RegressorParams(classWeights="balanced")': 'Unexpected keyword argument "classWeights"',
    'RecommenderParams(loss="MSELoss")': 'Unexpected keyword argument "loss"',
    'RunParams(dryRun="driver")': 'Unexpected keyword argument "dryRun"',
    'ClassificationModelParams(device="cpu")': 'Unexpected keyword argument "device"',
    'ClassifierParams().setEpochs("auto")': 'Argument 1 to "setEpochs" .* expected "int"',
    'ForecasterParams().getHorizon() + "a"': r'Unsupported operand types for \+ \("int" and "str"\)',
    "TabularClassifierParams().getEpochs() + 1": "Unsupported operand types",
    "ForecastingModelParams().setEpochs(3)": 'has no attribute "setEpochs"',
}
TAKEN = {
    name: [*inspect.signature(kind.__init__).parameters][1:]
    for module in MODULES
    for name, kind in vars(module).items()
    if hasattr(kind, "_table") and "__init__" in vars(kind)
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The errors that mypy finds, by the line of code that they are about."""
    folder = tmp_path_factory.mktemp("typed")
    every = [f"{name}({', '.join(f'{param}=anything' for param in params)})" for name, params in TAKEN.items()]
    lines = [*IMPORTS.splitlines(), *ACCEPTED.splitlines(), *every, *REFUSED]
    (folder / "mypy.ini").write_text(CONFIG)
    (folder / "typed.py").write_text("\n".join(lines))
    options = ["--config-file", f"{folder}/mypy.ini", "--cache-dir", f"{folder}/cache"]
    mypy = [sys.executable, "-m", "mypy", *options, f"{folder}/typed.py"]
    done = subprocess.run(mypy, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    reported = re.findall(r"typed\.py:(\d+): error: (.*)", done.stdout)
    texts: dict[str, str] = {}
    for number, error in reported:
        line = lines[int(number) - 1]
        texts[line] = f"{texts.get(line, '')}{error}\n"
    return texts


def test_mypy_accepts_each_param_that_a_constructor_takes_and_its_type(errors: dict[str, str]) -> None:
    assert {line: text for line, text in errors.items() if line not in REFUSED} == {}


@pytest.mark.parametrize("line", REFUSED)
def test_mypy_refuses_another_name_or_type_than_a_param_has(errors: dict[str, str], line: str) -> None:
    assert re.search(REFUSED[line], errors.get(line, ""))
