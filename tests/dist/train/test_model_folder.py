"""A model that ranks write into a folder, each its share, is that which rank 0 returns where it holds all of it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sparktorch import Callback
from sparktorch.adapters.huggingface.folder import opened
from sparktorch.adapters.huggingface.recipe import HuggingFaceRecipe
from sparktorch.base.batch import Batch
from sparktorch.base.deferred import deferred
from sparktorch.base.state_dict import pack_state, unpacked_weights
from sparktorch.base.weights_folder import INDEX, WeightsFolder
from sparktorch.base.world import World
from sparktorch.data.columns import VALIDATION
from sparktorch.errors import PersistenceError
from sparktorch.train.loop import model_folder
from sparktorch.train.loop.engine import Engine
from sparktorch.train.loop.model_folder import Weights
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.dist.strategies.test_strategies import PARTED, job_for
from tests.support.frames import Table
from tests.support.nets import Paired, Tower
from tests.support.parts import NormalisedScore
from tests.support.ranks import control_server, in_group, run_ranks, train_on
from tests.support.resume import STEPS, Counts, killed, timeless
from tests.support.resume import job_for as checkpointed
from tests.support.resume import parts as noisy_parts
from tests.support.staged_nets import Keeping
from tests.support.tiny_transformers import bert, gpt2, llama
from tests.unit.base.test_deferred import check_values

# Four steps of one size, and a validation of one: ranks that divide layers pay for every shape that they meet.
TABLE = Table.random(160, weighted=True, validated=True)
TABLE.arrays[VALIDATION] = np.arange(160) % 5 == 0
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"strategy": "zero3"}),
    "zero2": (2, {"strategy": "zero2", "strategy_params": PARTED}),
    "zero3": (3, {"strategy": "zero3", "strategy_params": PARTED}),
    "copies of shards": (4, {"strategy": "mesh", "strategy_params": {**PARTED, "shard": 2}}),
    "shards of layers": (4, {"strategy": "mesh", "strategy_params": {**PARTED, "shard": 2, "tensor": 2}}),
}


# Of tensors of `Keeping` that have several names.
OTHER_NAMES = {"out.weight", *(f"aliases.out.{name}" for name in ("weight", "bias", "factor"))}
STAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (2, {"pipeline": 2}),
    "shards of stages": (4, {"pipeline": 2, "shard": 2}),
    "layers of stages": (4, {"pipeline": 2, "tensor": 2}),
}


def parts(ranks: int) -> list[Any]:
    return [part.batches() for part in TABLE.parts(ranks)]


def check_same(found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    """Compares bits; a tensor that the module has under two names is in a folder under the first."""
    assert whole.keys() - found.keys() <= {"tied_again.weight"}
    assert all(torch.equal(found[name], whole[name]) for name in whole.keys() - {"tied_again.weight"})


class Counted(nn.Linear):
    """Counts its calls, in what no buffer holds."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x).squeeze(-1)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.calls = int(state)


def wrapped() -> nn.Module:
    """A layer whose activations are computed twice, with a name that no state dict has."""
    return nn.Sequential(checkpoint_wrapper(Counted(5, 1)))


def overlapping() -> nn.Module:
    """Has two buffers that show one table."""
    made, table = Counted(5, 1), torch.from_numpy(np.arange(12, dtype=np.float32))
    made.register_buffer("table", table)
    made.register_buffer("first", table[:4])
    return made


def begun(job: TrainJob) -> TrainJob:
    """Begins with the weights that workers begin with who write the model."""
    built = job.recipe.build_deferred(job.config.seed)
    built.materialise(built.module)
    return replace(job, recipe=replace(job.recipe, initial=pack_state(built.module.state_dict())))


def into(folder: Path, job: TrainJob) -> TrainJob:
    return replace(job, config=replace(job.config, model_folder=str(folder / "model")))


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_that_rank_0_returns(case: str, tmp_path: Path) -> None:
    ranks, config = CASES[case]
    module = Paired if "tensor" in config.get("strategy_params", {}) else Tower
    more = {"patience": 1, "ema_decay": 0.5} if case == "zero3" else {}
    job = job_for(recipe={"module": module}, **config, **more)
    expected, metas = train_on(parts(ranks), begun(job))
    (tmp_path / ".model.1234").mkdir()  # of an attempt that was killed while it wrote
    state, mine = train_on(parts(ranks), into(tmp_path, job))
    assert timeless(mine[0]["history"]) == timeless(metas[0]["history"])
    check_same(state, expected)
    left = {path.name for path in (tmp_path / "model").iterdir()}
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    assert left == {INDEX, *index["weight_map"].values()}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())


@pytest.mark.parametrize("error", [OSError("no space left"), SafetensorError("no space left")])
def test_a_training_that_fails_while_it_writes_leaves_nothing(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, file: str, tensors: Any) -> None:
        written(self, file, tensors)
        if file.startswith("model-00002"):
            raise error

    written = model_folder.ModelFolder._write
    monkeypatch.setattr(model_folder, "_LEAST_FILE_BYTES", 8)
    monkeypatch.setattr(model_folder.ModelFolder, "_write", full)
    folder = model_folder.ModelFolder(str(tmp_path / "model"), World())
    folder.check()
    with pytest.raises(PersistenceError, match=r"into modelDir: no space left .*\n.*needs room for the model"):
        folder.write({str(number): torch.ones(2) for number in range(3)})
    assert list(tmp_path.iterdir()) == []


_WRITES = """
import resource, sys, torch
from sparktorch.base.world import World
from sparktorch.train.loop.model_folder import ModelFolder

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

for megabytes in (1, 128):  # The first file loads what writes it.
    folder, weights = ModelFolder(f"{sys.argv[1]}/{megabytes}", World()), {"weight": torch.ones(megabytes << 18)}
    folder.check()
    before = peak()
    folder.write(weights)
print((peak() - before) >> 10)
"""


def test_a_file_of_a_model_is_written_without_a_copy_in_memory(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _WRITES, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EOPNOTSUPP])
def test_a_model_gets_its_place_file_by_file_where_folders_cannot_be_renamed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", refused)
    (tmp_path / "model").mkdir()  # an attempt was lost while it moved its files
    (tmp_path / "model" / "model-00001-of-00001.safetensors").write_bytes(b"half")
    for value in (1.0, 2.0):  # the second attempt finds what the first one has written
        folder = model_folder.ModelFolder(str(tmp_path / "model"), World())
        folder.check()
        assert folder.write({"weight": torch.full((2,), value)})["weight"].tolist() == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").touch()
    with pytest.raises(PersistenceError, match=r"modelDir cannot be used: .*models"):
        model_folder.ModelFolder(str(tmp_path / "models" / "model"), World()).check()


def test_ranks_that_outlive_their_attempt_change_no_model(tmp_path: Path) -> None:
    late, next_one = (model_folder.ModelFolder(str(tmp_path / "model"), World()) for _ in range(2))
    (tmp_path / ".model.mark-7").touch()  # of a rank that was killed in `check`
    with pytest.raises(PersistenceError, match="No such file"), late._published():
        next_one.check()  # removes what the late one has begun
    assert list(tmp_path.iterdir()) == []
    with next_one._published():
        next_one._fill({"x": torch.ones(2)})
        late.write({"x": torch.zeros(2)})
    assert next_one.write({"x": torch.ones(2)})["x"].tolist() == [0.0, 0.0]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


WHOLE: dict[str, Any] = {"recipe": {"module": Keeping}, "epochs": 4, "patience": 1, "ema_decay": 0.5}


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, torch.Tensor], list[float]]:
    """What one process trains, and its losses."""
    state, metas = train_on([TABLE.batches()], begun(job_for(**WHOLE)))
    return state, [record["val_loss"] for record in metas[0]["history"]]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "stages" else [pytest.mark.landing]) for case in STAGES]
)
def test_stages_are_written_as_one_process_trains_them(
    case: str, alone: tuple[dict[str, torch.Tensor], list[float]], tmp_path: Path
) -> None:
    ranks, sizes = STAGES[case]
    expected, losses = alone
    job = job_for(strategy="mesh", strategy_params={**PARTED, **sizes}, **WHOLE)
    state, metas = train_on(parts(ranks), into(tmp_path, job))
    torch.testing.assert_close(state, {name: expected[name] for name in state}, atol=1e-5, rtol=0)
    assert expected.keys() - state.keys() == OTHER_NAMES
    assert [record["val_loss"] for record in metas[0]["history"]] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("make", [lambda: Counted(5, 1), wrapped, overlapping])
def test_a_model_is_read_again_by_the_names_of_its_state_dict_with_extra_state_and_buffers_that_share_memory(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    config = job_for(strategy="zero3", model_folder=str(tmp_path / "model")).config
    recipe = Recipe(module=make, optimizer="SGD")
    engine = Engine(recipe, config, World(), steps=1)
    engine.module(torch.ones(2, 5))
    found = Weights(engine, config, World()).result(None)
    assert isinstance(found, WeightsFolder)
    again = replace(recipe, initial=found).build_module(1)
    expected = engine.unwrapped.state_dict()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in expected.items())
    assert [part.calls for part in again.modules() if isinstance(part, Counted)] == [1]


def test_statistics_are_those_of_rank_0(tmp_path: Path) -> None:
    job = job_for(recipe={"module": NormalisedScore}, strategy="zero3", strategy_params=PARTED)
    expected, _ = train_on(parts(2), begun(job))
    assert expected["layers.2.running_mean"].any()
    state, _ = train_on(parts(2), into(tmp_path, job))
    check_same(state, expected)


def jumping(folder: Path, callback: Callback | None, **config: Any) -> TrainJob:
    """At such a rate the loss soon jumps about: the best validation is an early one."""
    stops = {"epochs": 40, "patience": 2, "schedule_interval": "epoch", "warmup_steps": 0, "ema_decay": None}
    made = checkpointed(folder, callback, module=Tower, interval=4, **stops, **config)
    recipe = {"optimizer": "SGD", "optimizer_params": {"momentum": 0.9}, "learning_rate": 0.15}
    return into(folder, replace(made, recipe=replace(made.recipe, scheduler=None, scheduler_params={}, **recipe)))


SHARDS = {"strategy": "zero3", "strategy_params": {"min_parameters": 60}}
BOTH = {"strategy": "mesh", "strategy_params": {"min_parameters": 60, "pipeline": 2, "shard": 2}}


def test_the_best_weights_of_before_a_kill_are_kept_on_another_mesh(tmp_path: Path) -> None:
    expected, metas = train_on(noisy_parts(2), jumping(tmp_path / "calm", None, **SHARDS))
    losses = [record["val_loss"] for record in metas[0]["history"]]
    best = losses.index(min(losses))
    assert len(losses) < 40
    killed(jumping(tmp_path, Counts(tmp_path, rank=1, step=(best + 1) * STEPS + 9), **SHARDS), 2)
    state, _ = train_on(noisy_parts(4), jumping(tmp_path, None, **BOTH))
    assert all(torch.equal(state[name], value) for name, value in expected.items())


class Wide(nn.Module):
    """268 MB in equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found

    def stages(self) -> list[nn.Module]:
        return list(self.layers)


def _grown(world: World, folder: str, strategy: str, sizes: dict[str, Any]) -> list[float]:
    """Returns by how many MB the rank's memory has grown at most: built, and written."""

    def most() -> float:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1e3

    params = {"min_parameters": 1_000_000, **sizes}
    config = replace(job_for(strategy=strategy, strategy_params=params).config, model_folder=folder)
    example = Batch((torch.zeros(2, 1024),), None, None, 2)
    before = most()
    engine = Engine(Recipe(module=Wide, optimizer="SGD"), config, world, steps=1, example=lambda: example)
    built = most()
    Weights(engine, config, world).result(None)
    return [built - before, most() - before]


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("zero3", {}),
        pytest.param("mesh", {"pipeline": 2, "shard": 2}, marks=pytest.mark.landing),
    ],
)
def test_no_rank_ever_holds_the_whole(strategy: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    whole = 268.4
    for built, written in in_group(4, _grown, str(tmp_path / "model"), strategy, sizes):
        assert whole / 4 < built < whole / 2
        assert written < 0.75 * whole  # its share, and that of the model which it writes
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert max(file.stat().st_size for file in files) < 1.1e6 * whole / 8  # safetensors copies what it writes


def test_weights_to_begin_with_are_read_from_a_folder(tmp_path: Path) -> None:
    first = into(tmp_path, job_for(strategy="zero3", strategy_params=PARTED))
    with control_server() as server:
        ended = run_ranks(server, parts(2), first)
    weights = unpacked_weights(ended[0].result.payload)  # type: ignore[union-attr]
    assert isinstance(weights, WeightsFolder)
    (tmp_path / "next").mkdir()
    going_on = {"initial": weights}
    state, _ = train_on(parts(2), into(tmp_path / "next", job_for(recipe=going_on, **CASES["zero3"][1])))
    whole, _ = train_on(parts(2), job_for(recipe=going_on, strategy="ddp"))
    torch.testing.assert_close(state, {name: whole[name] for name in state}, atol=1e-5, rtol=0)


def _apart(world: World, folders: list[str]) -> str:
    model_folder._VISIBLE_SECONDS = 0.5
    model_folder.secrets.randbits = lambda bits: 5  # type: ignore[assignment]
    model_folder.sum_over_ranks = lambda values, world: torch.tensor([5.0])  # rank 0 would wait for the other
    try:
        model_folder.ModelFolder(folders[world.rank], world).check()
    except PersistenceError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_share_the_folder_are_told(tmp_path: Path) -> None:
    found = in_group(2, _apart, [str(tmp_path / str(rank) / "model") for rank in range(2)])
    assert "is not the folder that rank 0 has made" in found[1]
    assert "mounted under the same path on all hosts" in found[1]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("BertForSequenceClassification", bert()),
        ("GPT2LMHeadModel", gpt2()),
    ],
)
def test_models_of_hugging_face_are_initialised_as_by_their_constructors(kind: str, config: Any) -> None:
    def make() -> nn.Module:
        made: nn.Module = getattr(transformers, kind)(config)
        return made

    check_values(make)
    built = deferred(make)
    built.materialise(built.module)
    found, expected = ({name: t.std() for name, t in each.named_parameters()} for each in (built.module, make()))
    for name, deviation in expected.items():
        torch.testing.assert_close(found[name], deviation, rtol=0.3, atol=1e-3, equal_nan=True)


def test_a_model_of_hugging_face_is_read_and_written_in_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama(tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "base")
    parted = opened(str(tmp_path / "base"), {}, seed=0, in_place=True)
    assert parted is not None
    config = job_for(strategy="zero3", strategy_params=PARTED).config
    built = HuggingFaceRecipe(**parted).build_module(0)
    assert built.lm_head.weight is built.model.embed_tokens.weight
    found = in_group(2, _rewritten, parted, replace(config, model_folder=str(tmp_path / "model")))[0]
    again = transformers.LlamaForCausalLM.from_pretrained(
        _with_config(tmp_path / "base", Path(found)), local_files_only=True
    )
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())


def _rewritten(world: World, fields: dict[str, Any], config: Any) -> str:
    engine = Engine(HuggingFaceRecipe(**fields), config, world, steps=1)
    written = Weights(engine, config, world).result(None)
    assert isinstance(written, WeightsFolder)
    return written.path


def _with_config(base: Path, folder: Path) -> Path:
    (folder / "config.json").write_text((base / "config.json").read_text())
    return folder
