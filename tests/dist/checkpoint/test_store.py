"""Checkpoints: what one number of ranks wrote, another reads, however slow one of them is; damage is noticed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.base.state_dict import pack_state, unpack_state
from sparktorch.base.world import World
from sparktorch.errors import PersistenceError
from sparktorch.train.callbacks import FitContext
from sparktorch.train.checkpoint import tensors as tensors_of
from sparktorch.train.checkpoint.store import CheckpointStore, Manifest, read_tensors, snapshot
from sparktorch.train.checkpoint.tensors import create_optimizer_state, load_tensors, named_tensors, needed_parts
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.registry import build_strategy
from tests.support.nets import Tower
from tests.support.ranks import in_group, train_on
from tests.support.resume import STEPS, Counts, check_same_bits, job_for, killed, parts
from tests.support.saving import Counted, LocalFiles, wait_for_saves
from tests.support.waiting import until

OPTIONS: dict[str, dict[str, Any]] = {
    "zero1": {},
    "zero3": {"min_parameters": 60, "activation_checkpointing": True},
}


def _made(world: World, strategy: str, seed: int) -> tuple[Any, Any, Any, Any]:
    made = build_strategy(TrainConfig(strategy=strategy, strategy_params=OPTIONS[strategy]), world)
    recipe = Recipe(module=Tower, learning_rate=0.01)
    plain = recipe.build_module(seed)
    module = made.prepare(plain, Start())
    return made, plain, module, made.optimizer(recipe, plain)


def _steps(module: Any, optimizer: Any, count: int) -> None:
    for number in range(count):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 40, dtype=torch.float32).view(8, 5) + number
        module(x).square().mean().backward()  # the same on every rank: as on one
        optimizer.step()


def _save(world: World, strategy: str, url: str) -> bytes:
    made, plain, module, optimizer = _made(world, strategy, seed=1)
    _steps(module, optimizer, 3)
    share = snapshot(named_tensors(plain, optimizer), {"rank": world.rank}, made.saves)
    files = CheckpointStore(url).write_share(3, world.rank, share)
    (Path(url) / f"files-{world.rank}").write_text(json.dumps(files))
    _steps(module, optimizer, 2)
    return pack_state(made.state_dict(module))


def _load(world: World, strategy: str, url: str) -> bytes:
    store = CheckpointStore(f"counted://{url}")
    manifest = store.read_manifest(3)
    made, plain, module, optimizer = _made(world, strategy, seed=2)
    create_optimizer_state(optimizer)
    tensors = named_tensors(plain, optimizer)
    tensors_of._GAP_BYTES = 0  # what is not needed is not there, and would be zeros
    with store.local(manifest, needed_parts(tensors)) as directory:
        missing = tensors.keys() - load_tensors(directory, tensors)
        assert not missing, missing
    _steps(module, optimizer, 2)
    return pack_state(made.state_dict(module))


def _finish(url: Path, ranks: int) -> Manifest:
    files = {}
    for rank in range(ranks):
        files |= json.loads((url / f"files-{rank}").read_text())
    manifest = Manifest(step=3, epoch=0, step_in_epoch=3, world_size=ranks, job={}, files=files)
    CheckpointStore(str(url)).write_manifest(manifest)
    return manifest


def same(found: bytes, expected: bytes) -> None:
    torch.testing.assert_close(unpack_state(found), unpack_state(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("before", "writers", "after", "readers"),
    [("zero3", 1, "zero3", 3), ("zero3", 4, "zero3", 1), ("zero3", 2, "zero1", 3), ("zero1", 2, "zero1", 3)],
)
def test_what_some_ranks_wrote_any_number_of_ranks_goes_on_from_with_any_strategy(
    before: str, writers: int, after: str, readers: int, tmp_path: Path
) -> None:
    written = in_group(writers, _save, before, str(tmp_path))[0]
    _finish(tmp_path, writers)
    same(in_group(readers, _load, after, str(tmp_path))[0], written)


def test_a_rank_fetches_what_it_needs_and_no_more(tmp_path: Path) -> None:
    store = CheckpointStore(f"counted://{tmp_path}")
    files = {}
    for rank in range(2):
        tensors = {f"{kind}.{rank}": torch.full((1_000_000,), rank + 1.0) for kind in ("module", "optimizer", "best")}
        files |= store.write_share(3, rank, snapshot(tensors, {}, lambda _: True))
    manifest = Manifest(step=3, epoch=0, step_in_epoch=3, world_size=2, job={}, files=files)
    before = Counted.read
    with store.local(manifest, lambda name, *_: name == "optimizer.1") as directory:
        assert 4_000_000 <= Counted.read - before < 4_010_000
        assert torch.equal(read_tensors(directory, 1, "optimizer.")["1"], torch.full((1_000_000,), 2.0))


def test_an_unknown_file_system_is_refused() -> None:
    with pytest.raises(PersistenceError, match="cannot be opened"):
        CheckpointStore("nosuch://bucket/run")


class Held(LocalFiles):
    """The local files; rank 0's first share waits for `Ahead`, and rank 0 is killed once its checkpoint is there."""

    protocol = "held"

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        name, marks = path.rpartition("/")[2], Path("/", path).parents[2]
        if name == "rank-00000.pt" and not (marks / "killed").exists():
            until((marks / "ahead").exists, seconds=60, what="the other rank is ahead")
        super().pipe_file(path, value, **options)
        if name == "manifest.json" and not (marks / "killed").exists():
            (marks / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


fsspec.register_implementation("held", Held, clobber=True)


class Ahead(Counts):
    """Says when rank 1 is in its second epoch, and has written what it had to write of the first."""

    def on_epoch_start(self, context: FitContext) -> None:
        if (context.world.rank, context.epoch) == (1, 2):
            wait_for_saves()
            (self._folder / "ahead").touch()


def test_a_checkpoint_at_the_end_of_an_epoch_holds_the_same_moment_of_all_ranks(tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    expected = train_on(parts(2), job_for(calm, Counts(calm)))
    job = job_for(f"held://{rough}", Ahead(rough), interval=STEPS)
    killed(job, 2)
    found = train_on(parts(2), job)
    check_same_bits(found, expected)
    for meta in found[1]:
        assert meta["seconds"]["checkpoint_copy"] > 0
        assert meta["seconds"]["checkpoint_write"] > 0
