"""Exported graphs: they compute what the module computes, for any number of rows, and run nothing else."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.data.columns import TensorSpec
from sparktorch.errors import ModuleError
from sparktorch.model.export import ExportError, Program, check_archive, export_program

FEATURES = TensorSpec(name="x0", column="features", dtype="float32", shape=(16,))


class Picture(nn.Module):
    """Convolution, batch statistics, dropout, and a constant that is in no state dict."""

    position: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("position", torch.randn(3, 2, 2), persistent=False)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.convolve(x.view(-1, 1, 4, 4))) + self.position
        scores: torch.Tensor = self.out(self.drop(found.flatten(1)))
        return scores


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


def exported(module: nn.Module, *inputs: TensorSpec) -> tuple[Program, nn.Module]:
    program = export_program(module.eval(), inputs)
    return program, program(**module.state_dict()).eval()


@pytest.mark.parametrize("make", [Picture, Tied])
def test_the_graph_computes_what_the_module_computes(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    _, graph = exported(module, FEATURES)
    for rows in (0, 2):
        x = torch.randn(rows, 16)
        with torch.inference_mode():
            torch.testing.assert_close(graph(x), module(x), rtol=0, atol=0)


def test_weights_are_the_modules_and_stay_out_of_the_archive() -> None:
    module = nn.Linear(16, 4000)
    program, graph = exported(module, FEATURES)
    assert len(program.archive) < 20_000
    assert dict(graph.named_parameters()).keys() == dict(module.named_parameters()).keys()
    with torch.no_grad():
        graph.get_parameter("bias").fill_(7)
    x = torch.randn(2, 16)
    torch.testing.assert_close(graph(x), module(x) - module.bias + 7)


def test_a_graph_is_not_trained_on() -> None:
    _, graph = exported(nn.Linear(16, 2), FEATURES)
    with pytest.raises(ModuleError, match="exported graph, which is that of evaluation mode"):
        graph.train()


def test_what_cannot_be_captured_says_why_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ExportError, match="data-dependent"):
        export_program(Branching(16, 2).eval(), [FEATURES])
    assert capfd.readouterr() == ("", "")


def test_threads_may_export_at_once() -> None:
    modules = [Picture().eval(), Tied().eval()]
    x = torch.randn(2, 16)
    with ThreadPoolExecutor(2) as threads:
        exports = [threads.submit(exported, module, FEATURES) for module in modules]
        for module, export in zip(modules, exports, strict=True):
            torch.testing.assert_close(export.result()[1](x), module(x))


def rewritten(archive: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    return buffer.getvalue()


def in_graph(key: str, planted: str) -> Callable[[str, bytes], bytes]:

    def plant(value: Any, under: str = "") -> Any:
        if isinstance(value, dict):
            return {k: [planted] if k == key == "guards_code" else plant(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [plant(v, under) for v in value]
        return planted if under == key and isinstance(value, str) else value

    return lambda name, content: (
        json.dumps(plant(json.loads(content))).encode() if name.endswith("models/model.json") else content
    )


def in_record(end: str, content: bytes) -> Callable[[str, bytes], bytes]:
    return lambda name, before: content if name.endswith(end) else before


class Planted:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/never"),))


@pytest.mark.parametrize(
    "change",
    [
        in_graph("target", "torch.os.system"),
        in_graph("target", "torch.ops.aten.add.Tensor.__class__"),
        in_graph("expr_str", "exec(chr(49))"),
        in_graph("expr_str", "Symbol('s0').__class__"),
        in_record("constants/model_constants_config.json", b'{"config": {"x": {}}}'),
        in_graph("guards_code", "__import__('os').system('true')"),
        in_record("sample_inputs/model.pt", pickle.dumps(Planted())),
        in_record(
            "constants/model_constants_config.json",
            json.dumps({"config": {"x": {"path_name": "custom_obj_0", "use_pickle": True}}}).encode(),
        ),
    ],
)
def test_an_archive_that_would_run_more_than_operators_is_refused(change: Callable[[str, bytes], bytes]) -> None:
    program, _ = exported(Picture(), FEATURES)
    check_archive(rewritten(program.archive, lambda _, content: content))
    with pytest.raises(ExportError):
        check_archive(rewritten(program.archive, change))


class Longest(nn.Module):
    """Sums the elements of padded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.scale * (values * mask).sum(1)


def test_a_program_takes_padded_rows_of_any_length() -> None:
    spec = TensorSpec(name="x0", column="words", dtype="float32", layout="padded")
    program = export_program(Longest().eval(), [spec])
    module = program(**Longest().state_dict())
    for longest in (1, 4, 9):
        values = torch.ones(2, longest)
        assert module(values, torch.arange(longest) < torch.tensor([[1], [longest]])).tolist() == [1, longest]
    for layout in ("jagged", "sparse_csr"):
        with pytest.raises(ExportError, match=f"column 'words' is {layout}"):
            export_program(Longest().eval(), [replace(spec, layout=layout)])  # type: ignore[arg-type]
