"""A model on a mesh trains as one process does: in copies, shards, parts of layers, and in stages."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparktorch.base.config import CheckpointConfig
from sparktorch.base.world import World
from sparktorch.distributed.process_group import collectives_begun
from sparktorch.errors import ConfigError
from sparktorch.train.sharding.dtensor import part_of
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.fsdp import ShardingOptions, Zero3
from sparktorch.train.strategies.mesh import Mesh, MeshOptions
from sparktorch.train.strategies.registry import build_strategy, workers_for
from sparktorch.worker import TrainJob
from tests.support.attention_nets import Encoder, Heads
from tests.support.nets import Chain, Paired, Tower
from tests.support.ranks import control_server, in_group, run_ranks, train_on
from tests.support.resume import OwnSteps, timeless
from tests.support.strategies import (
    CONTRARY,
    FEW_STEPS,
    PARTED,
    STEEP,
    TABLE,
    Weights,
    alike,
    close,
    job_for,
    lone_rows,
    plain,
    trained,
)

LANDING = pytest.mark.landing
WHOLE = {"accumulation_steps": 1}
HEADS = {"tensor": 2, "plan": Heads.plan}


@dataclass(frozen=True)
class Case:
    """Ranks with the sizes of their mesh, what is trained, and how."""

    ranks: int
    sizes: dict[str, Any]
    module: Any = Paired
    recipe: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def made(self) -> dict[str, Any]:
        return {"module": self.module, **self.recipe}


MESHES = {
    "two copies of two shards": Case(4, {"shard": 2}, Tower),
    "copies only": Case(4, {"data": 4}, Tower),
    "shards only": Case(4, {"data": 1}, Tower),
    "layers": Case(2, {"tensor": 2}),
    "layers in four parts, of which some do not divide": Case(4, {"tensor": 4}),
    "copies of shards of layers": Case(8, {"data": 2, "shard": 2, "tensor": 2}),
    "heads": Case(2, HEADS, Heads, STEEP, WHOLE),
    "uneven shards of heads": Case(4, {**HEADS, "shard": 2}, partial(Heads, 12), STEEP, FEW_STEPS),
    "feed-forward layers of torch's": Case(2, {"tensor": 2}, Encoder, STEEP, FEW_STEPS),
    "two stages": Case(2, {"pipeline": 2}),
}
DEAR = {
    "all forward passes first": Case(2, {"pipeline": 2, "schedule": "gpipe", "micro_batches": 3}),
    "two stages of each rank": Case(2, {"pipeline": 2, "stages_per_rank": 2, "micro_batches": 4}),
    "stages of shards of layers": Case(8, {"pipeline": 2, "shard": 2, "tensor": 2, "micro_batches": 2}),
    "a stage that begins between two parts of layers": Case(
        4, {"pipeline": 2, "tensor": 2, "micro_batches": 2, "split": ["second.3"]}
    ),
    "stages of torch's layers": Case(4, {"tensor": 2, "pipeline": 2, "micro_batches": 2}, Encoder, STEEP, FEW_STEPS),
}


@pytest.mark.parametrize("name", [*MESHES, *(pytest.param(name, marks=LANDING) for name in DEAR)])
def test_ranks_train_what_one_plain_loop_trains_and_end_with_the_same_bits(name: str, tmp_path: Path) -> None:
    case = {**MESHES, **DEAR}[name]
    staged = "pipeline" in case.sizes
    whole = case.module in (Tower, Paired) and not staged  # no rank has all of the stages at once
    callbacks = {"callbacks": [Weights(tmp_path)]} if whole else {}
    found = trained(job_for(recipe={**case.made, **callbacks}, sizes=case.sizes, **case.config), case.ranks)
    close(found, plain(case.made, **case.config))
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == whole
    if staged:
        record, options = found[1][0]["history"][-1], MeshOptions(**case.sizes)
        wait = (options.stacked - 1) * options.stacked / options.stages
        assert record["pipeline_bubble_formula"] == pytest.approx(wait / (options.count + wait))
        assert 0 < record["pipeline_bubble"] < 1


@pytest.mark.parametrize(
    "case",
    [
        Case(4, {"tensor": 2}),
        pytest.param(Case(4, {"pipeline": 2, "data": 2, "micro_batches": 2}), marks=LANDING),
    ],
    ids=["layers", "stages"],
)
def test_ranks_without_rows_take_part_and_change_nothing(case: Case) -> None:
    job = job_for(recipe=case.made, sizes=case.sizes, **case.config)
    job = replace(job, placeholder=TABLE.batches()[0].slice(7, 1))
    close(train_on(lone_rows(case.ranks), job), plain(case.made, **case.config))


AVERAGED = {"clip_norm": 0.05, "ema_decay": 0.9, "patience": 1, "epochs": 9}
GROUPED = {
    "parameter_groups": [
        {"params": "first.*", "lr": 1e-2},
        {"params": ["norm.*", "second.0.*"], "weight_decay": 0.0},
    ],
    "freeze": ["second.3.bias"],
}
STAGES = {"pipeline": 4, "micro_batches": 4}


@pytest.mark.parametrize(
    "case",
    [
        Case(4, {"shard": 2}, Tower, {}, {**FEW_STEPS, "accumulation_steps": 2, "clip_norm": 0.05}),
        Case(4, {"shard": 2, "tensor": 2}, config=AVERAGED),
        Case(4, {"shard": 2, "tensor": 2}, config={**FEW_STEPS, "clip_value": 0.01}),
        *(
            pytest.param(case, marks=LANDING)
            for case in (
                Case(4, {"pipeline": 2, "shard": 2, "micro_batches": 2}, Paired, GROUPED, AVERAGED),
                Case(4, STAGES, Paired, GROUPED, {**FEW_STEPS, "clip_norm": 0.05, "clip_value": 0.01}),
            )
        ),
    ],
    ids=lambda case: " ".join([*case.sizes, *case.config]),
)
def test_gradients_are_clipped_as_those_of_one_model_averages_are_kept_and_training_stops_early(case: Case) -> None:
    jobs = (job_for(recipe=case.made, sizes=sizes, **case.config) for sizes in (case.sizes, None))
    mine, other = (trained(job, ranks, table=CONTRARY) for job, ranks in zip(jobs, (case.ranks, 1), strict=True))
    alike(mine, other, "gradient_norm", "val_loss")
    assert len(mine[1][0]["history"]) == (2 if "patience" in case.config else 1)


def saving(folder: Path, case: Case, sizes: dict[str, Any] | None, **kill: int) -> TrainJob:
    """Returns a training that saves after each step; `kill` says where it dies."""
    recipe = {**case.made, "callbacks": [OwnSteps(folder, **kill)]}
    checkpoint = CheckpointConfig(directory=str(folder.parent / "saved"), unit="step", interval=1, owner="me")
    return replace(job_for(recipe=recipe, sizes=sizes, **case.config), checkpoint=checkpoint)


def die(job: TrainJob, ranks: int) -> None:
    with control_server() as server:
        ended = run_ranks(server, [part.batches() for part in TABLE.parts(ranks)], job)
    assert any(rank.exitcode == -signal.SIGKILL for rank in ended), [rank.error for rank in ended]


HEADS_SAVED = Case(4, {}, Heads, STEEP, {**FEW_STEPS, "ema_decay": 0.5})


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        (Case(4, {}, Tower, {}, FEW_STEPS), [{"shard": 2}], {"shard": 4}),
        pytest.param(Case(4, {}, Chain, {}, {**FEW_STEPS, "patience": 5}), [STAGES], {"shard": 2}, marks=LANDING),
        pytest.param(HEADS_SAVED, [{**HEADS, "shard": 2}, {**HEADS, "data": 2}], None, marks=LANDING),
    ],
    ids=["shards", "stages", "heads"],
)
def test_a_killed_training_goes_on_on_another_mesh_and_in_one_process(
    case: Case, before: Sequence[dict[str, Any]], after: dict[str, Any] | None, tmp_path: Path
) -> None:
    for number, sizes in enumerate(before, 1):
        (tmp_path / str(number)).mkdir()
        die(saving(tmp_path / str(number), case, sizes, rank=case.ranks - 1, step=number + 2), case.ranks)
    (tmp_path / "last").mkdir()
    found = trained(saving(tmp_path / "last", case, after), 1 if after is None else case.ranks)
    alike(found, trained(job_for(recipe=case.made, **case.config)))
    assert int((tmp_path / "last" / "steps-0").read_text()) < 5  # those before the kill are not taken again


@LANDING
@pytest.mark.parametrize(
    "case",
    [
        Case(4, {"shard": 2, "tensor": 2}, partial(Paired, dropout=0.4), {}, FEW_STEPS),
        Case(2, {"pipeline": 2, "micro_batches": 2}, partial(Chain, dropout=0.3), {}, FEW_STEPS),
    ],
    ids=["layers", "stages"],
)
def test_a_killed_training_goes_on_to_the_same_bits(case: Case, tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm" / "own", tmp_path / "rough" / "own"
    for folder in (calm, rough):
        folder.mkdir(parents=True)
    expected, wanted = trained(saving(calm, case, case.sizes), case.ranks)
    die(saving(rough, case, case.sizes, rank=case.ranks - 1, step=3), case.ranks)
    found, metas = trained(saving(rough, case, case.sizes), case.ranks)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    times = ("pipeline_bubble",)
    ours, theirs = (
        [{name: value for name, value in record.items() if name not in times} for record in timeless(each)]
        for each in (metas[0]["history"], wanted[0]["history"])
    )
    assert ours == theirs
    assert int((rough / "steps-0").read_text()) < int((calm / "steps-0").read_text())


def test_dropout_draws_the_same_numbers_in_the_ranks_that_share_a_layer(tmp_path: Path) -> None:
    recipe = {"module": Paired, "module_params": {"dropout": 0.4}, "callbacks": [Weights(tmp_path)]}
    state, _ = trained(job_for(recipe=recipe, sizes={"tensor": 2}, **FEW_STEPS), 4)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    kept, _ = plain({"module": Paired}, **FEW_STEPS)
    assert any(not torch.allclose(value, kept[name], atol=1e-3) for name, value in state.items())


def groups_of(world: World, hosts: list[str], sizes: dict[str, int]) -> list[list[list[int]]]:
    """Returns the ranks of each group that all ranks are in, along `shard` and `tensor`."""
    config = job_for(sizes=sizes).config
    strategy = Mesh(config, replace(world, host=hosts[world.rank]), MeshOptions(**sizes))
    numbered = []
    for name in ("shard", "tensor"):
        if sizes.get(name, 1) == 1:
            continue
        part, total = part_of(strategy._ranks, name), torch.ones(1)
        dist.all_reduce(total, group=part.get_group())
        assert total == sizes[name]
        assert part.get_group().rank() == part.get_local_rank()  # collectives and offsets count alike
        numbered.append(dist.get_process_group_ranks(part.get_group()))
    return numbered


def test_inner_groups_are_those_of_a_host() -> None:
    both = in_group(4, groups_of, ["a", "b", "b", "a"], {"shard": 2, "tensor": 2})
    assert both == [[[0, 1], [0, 3]], [[0, 1], [1, 2]], [[3, 2], [1, 2]], [[3, 2], [0, 3]]]
    assert in_group(4, groups_of, ["a", "b", "a", "b"], {"shard": 2}) == [[[0, 2]], [[1, 3]]] * 2
    assert in_group(4, groups_of, ["a", "b", "a", "b"], {"shard": 4}) == [[[0, 1, 2, 3]]] * 4


def of_a_step(world: World, strategy: str, options: dict[str, Any]) -> tuple[int, int]:
    """Returns how many collectives a rank begins in a step, and how many groups there are."""
    shared = build_strategy(job_for(strategy=strategy, strategy_params={**PARTED, **options}).config, world)
    module = shared.prepare(Tower(), Start())
    gradients, before = shared.gradients(module), 0
    for _ in range(2):  # in the first step, ranks also compare what they call
        before = collectives_begun() or 0
        with gradients.reducing(rows=True):
            gradients.backward(module(torch.ones(2, 5)).sum(), rows=True)
    return (collectives_begun() or 0) - before, len(dist.distributed_c10d._world.pg_map)


def test_a_mesh_of_shards_alone_sends_what_zero3_sends_in_the_same_group() -> None:
    (steps, groups) = in_group(2, of_a_step, "zero3", {})[0]
    assert in_group(2, of_a_step, "mesh", {"shard": 2}) == [(steps, groups)] * 2
    assert groups == 1


def waits(world: World) -> list[timedelta]:
    """Returns how long collectives may wait, in the default group and in those of a mesh."""
    ranks = Mesh(job_for().config, world, MeshOptions(shard=2, tensor=2))._ranks
    groups: list[Any] = [dist.group.WORLD, *ranks.get_all_groups()]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_collectives_of_a_mesh_wait_as_long_as_those_of_all_ranks() -> None:
    for found in in_group(4, waits):
        assert len(found) == 3
        assert len(set(found)) == 1


def equal_meshes(world: World) -> bool:
    config = job_for(sizes={"shard": 2}).config
    first, second = (Mesh(config, world, MeshOptions(shard=2)).mesh for _ in range(2))
    whole, again = (Zero3[Any](config, world, ShardingOptions()).mesh for _ in range(2))
    return first == second or whole == again or part_of(first, "shard") == part_of(second, "shard")


def test_the_mesh_of_a_training_equals_none_of_an_earlier_one() -> None:
    assert in_group(2, equal_meshes) == [False, False]


def test_a_restart_takes_as_many_workers_as_the_mesh_can_use() -> None:
    config = job_for(sizes={"shard": 2}).config
    assert [workers_for(config, most, 1) for most in (4, 3, 2, 1)] == [4, 2, 2, None]
    assert workers_for(config, 3, 3) is None
    assert workers_for(job_for(sizes={"shard": 2, "data": 2}).config, 3, 1) is None
    assert workers_for(job_for(strategy="zero3").config, 3, 1) == 3


def test_dimensions_that_do_not_multiply_are_refused() -> None:
    with pytest.raises(ConfigError, match="data 2 x shard 3, which 4 workers cannot be divided into"):
        MeshOptions(data=2, shard=3).sizes(4)
