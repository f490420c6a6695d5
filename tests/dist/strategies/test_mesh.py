"""The model divided within groups of ranks and copied between them trains as one process does, on any mesh."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparktorch.base.config import CheckpointConfig
from sparktorch.base.world import World
from sparktorch.errors import ConfigError
from sparktorch.train.sharding.dtensor import part_of
from sparktorch.train.strategies.fsdp import ShardingOptions, Zero3
from sparktorch.train.strategies.mesh import Mesh, MeshOptions
from sparktorch.train.strategies.registry import workers_for
from sparktorch.worker import TrainJob
from tests.dist.strategies.test_strategies import FEW_STEPS, PARTED, STEPS, TABLE, Weights, job_for, plain
from tests.support.ranks import control_server, in_group, run_ranks, train_on
from tests.support.resume import OwnSteps

MESHES: dict[str, dict[str, int]] = {
    "two copies of two shards": {"shard": 2},
    "copies only": {"data": 4},
    "shards only": {"data": 1},
}


def mesh_job(sizes: dict[str, int], *, recipe: dict[str, Any] | None = None, **config: Any) -> TrainJob:
    return job_for(recipe=recipe, strategy="mesh", strategy_params={**PARTED, **sizes}, **config)


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, torch.Tensor], float]:
    return plain()


@pytest.mark.parametrize("case", MESHES)
def test_four_ranks_train_what_one_plain_loop_trains_and_end_with_the_same_bits(
    case: str, expected: tuple[dict[str, torch.Tensor], float], tmp_path: Path
) -> None:
    job = mesh_job(MESHES[case], recipe={"callbacks": [Weights(tmp_path)]})
    state, metas = train_on([part.batches() for part in TABLE.parts(4)], job)
    torch.testing.assert_close(state, expected[0], atol=1e-5, rtol=0)
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(expected[1], abs=1e-5)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_the_norm_is_that_of_one_model_not_of_its_copies() -> None:
    parts = [part.batches() for part in TABLE.parts(4)]
    few = {**FEW_STEPS, "accumulation_steps": 2}
    for config in (few, {**few, "clip_norm": 0.05}):
        mine, metas = train_on(parts, mesh_job({"shard": 2}, **config))
        other, expected = train_on([TABLE.batches()], job_for(**config))
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
        norms = [found[0]["history"][-1]["gradient_norm"] for found in (metas, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_checkpoint_of_a_mesh_is_gone_on_with_on_another(
    expected: tuple[dict[str, torch.Tensor], float], tmp_path: Path
) -> None:
    parts = [part.batches() for part in TABLE.parts(4)]

    def job(shard: int, **kill: int) -> TrainJob:
        checkpoint = CheckpointConfig(directory=str(tmp_path / "saved"), unit="step", interval=1, owner="me")
        made = mesh_job({"shard": shard}, recipe={"callbacks": [OwnSteps(tmp_path, **kill)]})
        return replace(made, checkpoint=checkpoint)

    with control_server() as server:
        ended = run_ranks(server, parts, job(2, rank=3, step=4))
    assert any(rank.exitcode == -signal.SIGKILL for rank in ended)
    state, _ = train_on(parts, job(4))
    torch.testing.assert_close(state, expected[0], atol=1e-5, rtol=0)
    assert int((tmp_path / "steps-0").read_text()) < STEPS  # those before the kill are not taken again


def groups_of(world: World, hosts: list[str], shard: int) -> list[list[int]]:
    place = replace(world, host=hosts[world.rank])
    mesh = Mesh(mesh_job({"shard": shard}).config, place, MeshOptions(shard=shard)).mesh
    total = torch.ones(1)
    dist.all_reduce(total, group=part_of(mesh, "shard").get_group())
    assert total == shard
    assert (
        part_of(mesh, "shard").get_group().rank() == part_of(mesh, "shard").get_local_rank()
    )  # collectives and offsets count alike
    found: list[list[int]] = mesh.mesh.tolist()
    return found


def test_groups_are_those_of_a_host() -> None:
    assert in_group(4, groups_of, ["a", "b", "a", "b"], 2) == [[[0, 2], [1, 3]]] * 4
    assert in_group(4, groups_of, ["a", "b", "b", "a"], 2) == [[[0, 3], [1, 2]]] * 4
    assert in_group(4, groups_of, ["a", "b", "a", "b"], 4) == [[[0, 1, 2, 3]]] * 4


def equal_meshes(world: World) -> bool:
    config = mesh_job({"shard": 2}).config
    first, second = (Mesh(config, world, MeshOptions(shard=2)).mesh for _ in range(2))
    whole, again = (Zero3[Any](config, world, ShardingOptions()).mesh for _ in range(2))
    return first == second or whole == again or part_of(first, "shard") == part_of(second, "shard")


def test_the_mesh_of_a_training_equals_none_of_an_earlier_one() -> None:
    assert in_group(2, equal_meshes) == [False, False]


def test_a_restart_takes_as_many_workers_as_the_mesh_can_use() -> None:
    config = mesh_job({"shard": 2}).config
    assert [workers_for(config, most, 1) for most in (4, 3, 2, 1)] == [4, 2, 2, None]
    assert workers_for(config, 3, 3) is None
    assert workers_for(mesh_job({"shard": 2, "data": 2}).config, 3, 1) is None
    assert workers_for(job_for(strategy="zero3").config, 3, 1) == 3


@pytest.mark.parametrize(
    ("options", "workers", "says"),
    [
        ({}, 4, "strategy 'mesh' has no dimension"),
        ({"shard": 3}, 4, "shard 3, which 4 workers cannot be divided into"),
        ({"data": 2, "shard": 3}, 4, "data 2 x shard 3, which 4 workers"),
    ],
)
def test_dimensions_that_do_not_multiply_are_refused(options: dict[str, int], workers: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MeshOptions(**options).sizes(workers)
