"""Seconds a step of strategy "mesh", beside the same model divided by hand with torch's own functions.

Spawned Gloo ranks without Spark, one torch thread each, in groups that sparktorch opens; the sides take turns in the
same processes, as in `benchmarks.loop`. By hand, ranks that share layers draw the same rows from tensors in memory,
where those of sparktorch exchange their rows: both sides compute on as many. Stages begin with the same layers, and
pass on as many micro-batches by the same schedule, 1F1B.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.common import Goal, arguments, interleave, machine, report, workspace
from benchmarks.nets import Mlp
from benchmarks.ranks import Place, Ranks, arrays_of, fit
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.data.columns import LABEL, input_name
from sparktorch.distributed.process_group import process_group
from sparktorch.train.recipe.recipe import Recipe

LAYERS, WIDTH, BATCH, STEPS = 7, 1024, 256, 8  # seven hidden layers and the last one: four pairs
LEARNING_RATE = 1e-3
TIMEOUT = timedelta(minutes=5)
Sizes = tuple[int, int, int, int]
# Ranks, and the sizes of data, pipeline, shard and tensor.
MESHES: dict[str, tuple[int, Sizes]] = {
    "2 ranks, shard": (2, (1, 1, 2, 1)),
    "2 ranks, tensor": (2, (1, 1, 1, 2)),
    "2 ranks, pipeline": (2, (1, 2, 1, 1)),
    "4 ranks, data x shard": (4, (2, 1, 2, 1)),
    "4 ranks, data x tensor": (4, (2, 1, 1, 2)),
    "4 ranks, data x pipeline": (4, (2, 2, 1, 1)),
    "4 ranks, shard x tensor": (4, (1, 1, 2, 2)),
    "4 ranks, pipeline": (4, (1, 4, 1, 1)),
}
MICRO_BATCHES = 4  # for each stage
GOALS = {f"{name}: mesh / by hand": Goal(1.05) for name in MESHES}


def starts(stages: int) -> list[int]:
    """Returns the places of the layers in `Mlp.layers` that stages begin with, each with as many linear ones."""
    return [2 * (LAYERS + 1) // stages * stage for stage in range(stages)]


def ours(place: Place, sizes: Sizes, epochs: int) -> float:
    """Returns the mean seconds of a step of the training loop, but for those of the first epoch."""
    options: dict[str, Any] = dict(zip(("data", "pipeline", "shard", "tensor"), sizes, strict=True))
    if sizes[1] > 1:
        split = [f"layers.{start}" for start in starts(sizes[1])[1:]]
        options |= {"micro_batches": MICRO_BATCHES * sizes[1], "split": split}
    config = TrainConfig(
        task="regression",
        batch_size=BATCH * place.world.world_size,
        epochs=epochs,
        strategy="mesh",
        strategy_params=options,
    )
    recipe = Recipe(module=Mlp, module_params={"width": WIDTH, "layers": LAYERS}, learning_rate=LEARNING_RATE)
    course = fit(place, BATCH * STEPS, Mlp.inputs, recipe, config)
    return statistics.fmean(course.epochs[1:]) / STEPS


def by_hand(place: Place, sizes: Sizes, epochs: int) -> float:
    """Returns the same of a loop with torch's own functions."""
    with process_group(place.world, place.store(), timeout=TIMEOUT):
        return loop_by_hand(place.world, sizes, epochs)


def loop_by_hand(world: World, sizes: Sizes, epochs: int) -> float:
    """The loop; its module is gone before the group is."""
    _, stages, _, tensor = sizes
    # torch caches what is of equal meshes
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copy", "stage", "part", "layer"))
    together = stages * tensor  # ranks with the same rows
    holder = mesh.get_local_rank("copy") * sizes[2] + mesh.get_local_rank("part")
    sampler = World(rank=holder, world_size=world.world_size // together)
    arrays = arrays_of(sampler, BATCH * STEPS * together, Mlp.inputs)
    features, label = torch.tensor(arrays[input_name(0)]), torch.tensor(arrays[LABEL])
    torch.manual_seed(0)
    whole = Mlp(WIDTH, LAYERS)
    linear = [name for name, part in whole.named_modules() if isinstance(part, nn.Linear)]
    if tensor > 1:
        styles = {name: RowwiseParallel() if i % 2 else ColwiseParallel() for i, name in enumerate(linear)}
        parallelize_module(whole, mesh["layer"], styles, src_data_rank=None)
    module: nn.Module = whole
    if stages > 1:
        own, ends = mesh.get_local_rank("stage"), [*starts(stages), len(whole.layers)]
        last = [nn.Flatten(0)] if own == stages - 1 else []
        module = nn.Sequential(*list(whole.layers)[ends[own] : ends[own + 1]], *last)
    if stages < world.world_size:
        for part in module.modules():
            if isinstance(part, nn.Linear) and part.out_features > 1:
                fully_shard(part, mesh=mesh["copy", "part"], reshard_after_forward=stages == 1)
        fully_shard(module, mesh=mesh["copy", "part"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    step = passes(module, mesh) if stages > 1 else partial(one_pass, module)
    torch.manual_seed(holder)
    took = []
    for _ in range(epochs):
        started = time.perf_counter()
        loss_sum = torch.zeros(())
        for index in torch.randperm(len(label)).split(BATCH * together):
            optimizer.zero_grad()
            loss_sum += step(features.index_select(0, index), label.index_select(0, index))
            optimizer.step()
        took.append(time.perf_counter() - started)
    return statistics.fmean(took[1:]) / STEPS


def one_pass(module: nn.Module, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Runs forward and backward; returns the loss."""
    loss: torch.Tensor = nn.functional.mse_loss(module(features), label)
    loss.backward()
    return loss.detach()


def passes(stage: nn.Module, mesh: DeviceMesh) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a function that passes rows through the stages, forward and backward; the last one's returns the loss."""
    group = mesh.get_group("stage")
    own, stages = group.rank(), group.size()
    micro_batches = MICRO_BATCHES * stages
    rows = BATCH * stages // micro_batches
    ends = [torch.empty(rows, width) for width in (Mlp.inputs, WIDTH)]
    piped = PipelineStage(
        stage,
        own,
        stages,
        torch.device("cpu"),
        input_args=ends[0] if own == 0 else ends[1].requires_grad_(),
        output_args=torch.empty(rows).requires_grad_() if own == stages - 1 else ends[1].clone().requires_grad_(),
        group=group,
    )
    schedule = Schedule1F1B(piped, micro_batches, loss_fn=nn.functional.mse_loss)

    def step(features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        schedule.step(*([features] if own == 0 else []), target=label, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    rounds, epochs = 2 if options.quick else 5, 2
    with workspace(), Ranks(4) as ranks:

        def side(body: Callable[..., float], size: int, sizes: Sizes) -> float:
            return 1000 * statistics.fmean(ranks.first(size, body, sizes, epochs))

        sides = {
            f"{name}: {kind}": partial(side, body, *mesh)
            for name, mesh in MESHES.items()
            for kind, body in (("mesh", ours), ("by hand", by_hand))
        }
        interleave(sides, 1)  # warms up
        samples = interleave(sides, rounds)
    median = {name: statistics.median(values) for name, values in samples.items()}
    report(
        "mesh",
        samples={f"{name}, ms a step": values for name, values in samples.items()},
        ratios={f"{name}: mesh / by hand": median[f"{name}: mesh"] / median[f"{name}: by hand"] for name in MESHES},
        goals=GOALS,
        facts=machine("torch"),
        path=options.json,
    )


if __name__ == "__main__":
    main()
