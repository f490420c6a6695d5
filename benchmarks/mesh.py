"""Seconds a step of strategy "mesh", beside the same model divided by hand with torch's own functions.

Spawned Gloo ranks without Spark, one torch thread each, in groups that sparktorch opens; the sides take turns in the
same processes, as in `benchmarks.loop`. By hand, ranks that share layers draw the same rows from tensors in memory,
where those of sparktorch exchange their rows: both sides compute on as many.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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
# Ranks, and the sizes of data, shard and tensor.
MESHES = {
    "2 ranks, shard": (2, (1, 2, 1)),
    "2 ranks, tensor": (2, (1, 1, 2)),
    "4 ranks, data x shard": (4, (2, 2, 1)),
    "4 ranks, data x tensor": (4, (2, 1, 2)),
    "4 ranks, shard x tensor": (4, (1, 2, 2)),
}
GOALS = {f"{name}: mesh / by hand": Goal(1.05) for name in MESHES}


def ours(place: Place, sizes: tuple[int, int, int], epochs: int) -> float:
    """Returns the mean seconds of a step of the training loop, but for those of the first epoch."""
    config = TrainConfig(
        task="regression",
        batch_size=BATCH * place.world.world_size,
        epochs=epochs,
        strategy="mesh",
        strategy_params=dict(zip(("data", "shard", "tensor"), sizes, strict=True)),
    )
    recipe = Recipe(module=Mlp, module_params={"width": WIDTH, "layers": LAYERS}, learning_rate=LEARNING_RATE)
    course = fit(place, BATCH * STEPS, Mlp.inputs, recipe, config)
    return statistics.fmean(course.epochs[1:]) / STEPS


def by_hand(place: Place, sizes: tuple[int, int, int], epochs: int) -> float:
    """Returns the same of a loop with torch's own functions."""
    with process_group(place.world, place.store(), timeout=TIMEOUT):
        return loop_by_hand(place.world, sizes, epochs)


def loop_by_hand(world: World, sizes: tuple[int, int, int], epochs: int) -> float:
    """The loop; its module is gone before the group is."""
    mesh = init_device_mesh(
        "cpu", sizes, mesh_dim_names=("copy", "part", "layer")
    )  # torch caches what is of equal meshes
    tensor = sizes[2]
    sampler = World(
        rank=world.rank // tensor, world_size=world.world_size // tensor
    )  # the last dimension is the innermost
    arrays = arrays_of(sampler, BATCH * STEPS * tensor, Mlp.inputs)
    features, label = torch.tensor(arrays[input_name(0)]), torch.tensor(arrays[LABEL])
    torch.manual_seed(0)
    module = Mlp(WIDTH, LAYERS)
    if tensor > 1:
        linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        styles = {name: RowwiseParallel() if i % 2 else ColwiseParallel() for i, name in enumerate(linear)}
        parallelize_module(module, mesh["layer"], styles, src_data_rank=None)
    for part in (*(part for part in module.layers if isinstance(part, nn.Linear) and part.out_features > 1), module):
        fully_shard(part, mesh=mesh["copy", "part"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    criterion = nn.MSELoss()
    torch.manual_seed(sampler.rank)
    took = []
    for _ in range(epochs):
        started = time.perf_counter()
        loss_sum = torch.zeros(())
        for index in torch.randperm(len(label)).split(BATCH * tensor):
            optimizer.zero_grad()
            loss = criterion(module(features.index_select(0, index)), label.index_select(0, index))
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        took.append(time.perf_counter() - started)
    return statistics.fmean(took[1:]) / STEPS


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    rounds, epochs = (2, 2) if options.quick else (5, 3)
    with workspace(), Ranks(4) as ranks:

        def side(body: Callable[..., float], size: int, sizes: tuple[int, int, int]) -> float:
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
