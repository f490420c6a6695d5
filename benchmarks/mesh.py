"""Seconds a step of strategy "mesh", beside the same model divided by hand with torch's own functions.

Spawned Gloo ranks without Spark, one torch thread each, in groups that sparktorch opens; the sides take turns, each in
processes of its own. By hand, ranks that share layers draw the same rows from tensors in memory, where those of
sparktorch exchange their rows: both sides compute on as many. Stages begin with the same layers, and pass on as many
micro-batches by the same schedule, 1F1B. Encoders are `torch.nn`'s here, and by hand ones of linear layers, which
`parallelize_module` can divide. Where parameters are sharded, an encoder's layers are gathered by themselves.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.common import Goal, arguments, interleave, machine, report, workspace
from benchmarks.nets import Encoder, EncoderByHand, EncoderLayerByHand, Mlp
from benchmarks.ranks import RankContext, Ranks, arrays_of, fit
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.data.columns import LABEL, input_name
from sparktorch.distributed.process_group import process_group
from sparktorch.train.recipe.recipe import Recipe

LAYERS, WIDTH, BATCH, STEPS = 7, 1024, 256, 8  # Seven hidden layers and the last one are four pairs.
ENCODER_BATCH = 8
ENCODER_LAYER = 500_000  # Each layer of the encoder has more parameters.
LEARNING_RATE = 1e-3
TIMEOUT = timedelta(minutes=5)
Sizes = tuple[int, int, int, int]


@dataclass(frozen=True)
class Case:
    """What is divided, and how.

    Attributes:
        ranks: Number of ranks.
        sizes: Of the dimensions data, pipeline, shard and tensor.
        encoder: Whether the model is an encoder, not an MLP.
        sequence: Whether sequences are divided between layers.
        again: Whether our layers gather them again backward; by hand, they keep them.
    """

    ranks: int
    sizes: Sizes
    encoder: bool = False
    sequence: bool = False
    again: bool = False

    @property
    def batch(self) -> int:
        """Rows that each rank brings to a step."""
        return ENCODER_BATCH if self.encoder else BATCH

    @property
    def inputs(self) -> int:
        """Numbers in a row."""
        return Encoder.inputs if self.encoder else Mlp.inputs


CASES = {
    "2 ranks, shard": Case(2, (1, 1, 2, 1)),
    "2 ranks, encoder, shard": Case(2, (1, 1, 2, 1), encoder=True),
    "2 ranks, tensor": Case(2, (1, 1, 1, 2)),
    "2 ranks, encoder, tensor": Case(2, (1, 1, 1, 2), encoder=True),
    "2 ranks, encoder, tensor and sequence": Case(2, (1, 1, 1, 2), encoder=True, sequence=True),
    "2 ranks, encoder, tensor and sequence, gathered again": Case(
        2, (1, 1, 1, 2), encoder=True, sequence=True, again=True
    ),
    "2 ranks, pipeline": Case(2, (1, 2, 1, 1)),
    "4 ranks, data x shard": Case(4, (2, 1, 2, 1)),
    "4 ranks, data x tensor": Case(4, (2, 1, 1, 2)),
    "4 ranks, data x pipeline": Case(4, (2, 2, 1, 1)),
    "4 ranks, shard x tensor": Case(4, (1, 1, 2, 2)),
    "4 ranks, pipeline": Case(4, (1, 4, 1, 1)),
    "4 ranks, encoder, tensor": Case(4, (1, 1, 1, 4), encoder=True),
    "4 ranks, encoder, tensor and sequence": Case(4, (1, 1, 1, 4), encoder=True, sequence=True),
}
MICRO_BATCHES = 4  # There are so many for each stage.
GOALS = {f"{name}: mesh / by hand": Goal(1.05) for name, case in CASES.items() if not case.again}


def starts(stages: int) -> list[int]:
    """Returns the indices in `Mlp.layers` at which stages begin, all with as many linear layers."""
    return [2 * (LAYERS + 1) // stages * stage for stage in range(stages)]


def ours(context: RankContext, case: Case, epochs: int) -> float:
    """Returns the mean seconds of a step of the training loop, but for those of the first epoch."""
    options: dict[str, Any] = dict(zip(("data", "pipeline", "shard", "tensor"), case.sizes, strict=True))
    stages = case.sizes[1]
    if stages > 1:
        split = [f"layers.{start}" for start in starts(stages)[1:]]
        options |= {"micro_batches": MICRO_BATCHES * stages, "split": split}
    if case.encoder:
        options["min_parameters"] = ENCODER_LAYER
    if case.sequence:
        options |= {"sequence": True, "recompute_allgather": case.again}
    config = TrainConfig(
        task="regression",
        batch_size=case.batch * context.world.world_size,
        epochs=epochs,
        strategy="mesh",
        strategy_params=options,
    )
    module, params = (Encoder, {}) if case.encoder else (Mlp, {"width": WIDTH, "layers": LAYERS})
    recipe = Recipe(module=module, module_params=params, learning_rate=LEARNING_RATE)
    course = fit(context, case.batch * STEPS, case.inputs, recipe, config)
    return statistics.fmean(course.epochs[1:]) / STEPS


def by_hand(context: RankContext, case: Case, epochs: int) -> float:
    """Returns the same of a loop with torch's own functions."""
    with process_group(context.world, context.store(), timeout=TIMEOUT):
        return loop_by_hand(context.world, case, epochs)


def loop_by_hand(world: World, case: Case, epochs: int) -> float:
    """Runs the loop; its module is gone before the group is."""
    _, stages, _, tensor = sizes = case.sizes
    # torch caches the groups of equal meshes.
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copy", "stage", "part", "layer"))
    ranks_per_batch = stages * tensor  # So many ranks have the same rows.
    holder = mesh.get_local_rank("copy") * sizes[2] + mesh.get_local_rank("part")
    sampler = World(rank=holder, world_size=world.world_size // ranks_per_batch)
    arrays = arrays_of(sampler, case.batch * STEPS * ranks_per_batch, case.inputs)
    features, label = torch.tensor(arrays[input_name(0)]), torch.tensor(arrays[LABEL])
    torch.manual_seed(0)
    module: nn.Module = EncoderByHand() if case.encoder else Mlp(WIDTH, LAYERS)
    if tensor > 1:
        styles = encoder_styles(case.sequence) if case.encoder else mlp_styles(module)
        parallelize_module(module, mesh["layer"], styles, src_data_rank=None)
    if stages > 1:
        layers = list(module.layers)  # type: ignore[arg-type]
        stage, ends = mesh.get_local_rank("stage"), [*starts(stages), len(layers)]
        layers = layers[ends[stage] : ends[stage + 1]]
        if stage == stages - 1:
            layers.append(nn.Flatten(0))
        module = nn.Sequential(*layers)
    if sizes[0] * sizes[2] > 1:
        unit = EncoderLayerByHand if case.encoder else nn.Linear
        for part in module.modules():
            if isinstance(part, unit) and getattr(part, "out_features", WIDTH) > 1:
                fully_shard(part, mesh=mesh["copy", "part"], reshard_after_forward=stages == 1)
        fully_shard(module, mesh=mesh["copy", "part"])
    optimizer = torch.optim.AdamW(groups(module.parameters()), lr=LEARNING_RATE, fused=True)
    step = passes(module, mesh) if stages > 1 else partial(one_pass, module)
    torch.manual_seed(holder)
    took = []
    for _ in range(epochs):
        started = time.perf_counter()
        loss_sum = torch.zeros(())
        for index in torch.randperm(len(label)).split(case.batch * ranks_per_batch):
            optimizer.zero_grad()
            loss_sum += step(features.index_select(0, index), label.index_select(0, index))
            optimizer.step()
        took.append(time.perf_counter() - started)
    return statistics.fmean(took[1:]) / STEPS


def mlp_styles(module: nn.Module) -> dict[str, ParallelStyle]:
    """Returns how each linear layer is divided."""
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    return {name: RowwiseParallel() if i % 2 else ColwiseParallel() for i, name in enumerate(linear)}


def encoder_styles(sequence: bool) -> dict[str, ParallelStyle]:
    """Returns how each part of `EncoderByHand` is divided, after torch's tutorial of tensor parallelism.

    Between layers there are `DTensor`s if sequences are divided.
    """
    styles: dict[str, ParallelStyle] = {}
    for i in range(Encoder.layers):
        between = RowwiseParallel(output_layouts=Shard(1), use_local_output=False) if sequence else RowwiseParallel()
        blocks = {"attention": (("q", "k", "v"), "out"), "network": (("first",), "last")}
        for block, (columns, rows) in blocks.items():
            styles |= {f"layers.{i}.{block}.{name}": ColwiseParallel() for name in columns}
            styles[f"layers.{i}.{block}.{rows}"] = between
            # Once for each block, so that the gradients of its input are summed once.
            styles[f"layers.{i}.{block}"] = PrepareModuleInput(
                input_layouts=(Shard(1) if sequence else Replicate(),), desired_input_layouts=(Replicate(),)
            )
            if sequence:
                styles[f"layers.{i}.{block}_norm"] = SequenceParallel()
    if sequence:
        styles["layers.0"] = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
        styles[f"layers.{Encoder.layers - 1}"] = PrepareModuleOutput(
            output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),)
        )
    return styles


def groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Returns an optimizer's groups; one step takes no distributed tensors beside others."""
    by_kind: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [{"params": same_kind} for same_kind in by_kind.values()]


def one_pass(module: nn.Module, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Runs forward and backward; returns the loss."""
    loss: torch.Tensor = nn.functional.mse_loss(module(features), label)
    loss.backward()
    return loss.detach()


def passes(stage: nn.Module, mesh: DeviceMesh) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a function that passes rows through the stages, forward and backward; the last one's returns the loss."""
    group = mesh.get_group("stage")
    index, stages = group.rank(), group.size()
    micro_batches = MICRO_BATCHES * stages
    rows = BATCH * stages // micro_batches
    ends = [torch.empty(rows, width) for width in (Mlp.inputs, WIDTH)]
    piped = PipelineStage(
        stage,
        index,
        stages,
        torch.device("cpu"),
        input_args=ends[0] if index == 0 else ends[1].requires_grad_(),
        output_args=torch.empty(rows).requires_grad_() if index == stages - 1 else ends[1].clone().requires_grad_(),
        group=group,
    )
    schedule = Schedule1F1B(piped, micro_batches, loss_fn=nn.functional.mse_loss)

    def step(features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        schedule.step(*([features] if index == 0 else []), target=label, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    rounds, epochs = (2, 2) if options.quick else (5, 5)
    samples: dict[str, list[float]] = {}

    def milliseconds(ranks: Ranks, body: Callable[..., float], case: Case) -> float:
        return 1000 * statistics.fmean(ranks(body, case, epochs))

    with workspace():
        for name, case in CASES.items():
            # Each side has its own processes, for what one leaves in a process's memory is no longer free to the other.
            with Ranks(case.ranks) as one, Ranks(case.ranks) as other:
                sides = {
                    f"{name}: {kind}": partial(milliseconds, ranks, body, case)
                    for kind, ranks, body in (("mesh", one, ours), ("by hand", other, by_hand))
                }
                interleave(sides, 1)  # These turns warm up.
                samples |= interleave(sides, rounds)

    def ratio(one: str, other: str) -> float:
        """Returns the median over rounds, in each of which both sides had their turn."""
        return statistics.median(map(operator.truediv, samples[one], samples[other]))

    def of_cases(one: str, other: str) -> float:
        """Returns the ratio of the medians of two cases, which were measured one after the other."""
        return statistics.median(samples[one]) / statistics.median(samples[other])

    report(
        "mesh",
        samples={f"{name}, ms a step": values for name, values in samples.items()},
        ratios={
            **{f"{name}: mesh / by hand": ratio(f"{name}: mesh", f"{name}: by hand") for name in CASES},
            **{
                f"{name}, with / without sequence: {kind}": of_cases(f"{name} and sequence: {kind}", f"{name}: {kind}")
                for name in CASES
                if f"{name} and sequence" in CASES
                for kind in ("mesh", "by hand")
            },
        },
        goals=GOALS,
        facts=machine("torch"),
        path=options.json,
    )


if __name__ == "__main__":
    main()
