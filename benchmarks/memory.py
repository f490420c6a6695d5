"""Bytes of parameters, gradients and optimizer state a rank, beside the formulas of the ZeRO paper.

An MLP of eight layers of 1024, AdamW, spawned Gloo ranks on one machine; no Spark. With P bytes of parameters,
data parallel keeps P, P and 2P (AdamW's two moments); stage 1 keeps P, P and 2P / N; stage 2 P, P / N and 2P / N;
stage 3 P / N, P / N and 2P / N (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 5); a mesh those of
stage 3 with the ranks of a group, here two, for N: parameters are sharded, layers divided, or some of the layers there.
Measured are the parameters between forward and backward, and gradients and state after the step, of the rank that keeps
most: under stage 1 shares are whole tensors. Of a pipeline, also what its first stage keeps for backward passes: the
inputs of its layers, of all micro-batches by GPipe's schedule, of as many as there are stages by 1F1B (Narayanan et al.
2021, https://arxiv.org/abs/2104.04473, section 2.2).

A Llama of four layers of 1024 has its units by default, on two ranks: how often a forward pass gathers parameters for
each layer, beside once for the rest, and what `activation_checkpointing` leaves of the activations that are kept.

The ratios are how far from its formula a figure is, up or down, at the worst of 2, 4 and 8 ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from benchmarks.common import Goal, arguments, machine, report, workspace
from benchmarks.ranks import RankContext, Ranks
from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.distributed.process_group import collectives_begun
from sparktorch.train.checkpoint.tensors import own_optimizer
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.dtensor import local
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.registry import build_strategy, strategy_for

LAYERS, WIDTH = 8, 1024
SIZES = (2, 4, 8)
GROUP = 2  # A group of the meshes has so many ranks.
MICRO_BATCHES, ROWS = 8, 64
PIPELINES = {
    f"mesh, {schedule}": {"pipeline": GROUP, "schedule": schedule, "micro_batches": MICRO_BATCHES}
    for schedule in ("1f1b", "gpipe")
}
MESHES: dict[str, dict[str, Any]] = {"mesh": {"shard": GROUP}, "mesh, tensor": {"tensor": GROUP}, **PIPELINES}
# By strategy, what of it is divided by the number of ranks, or of those of a group.
DIVIDED: dict[str, list[str]] = {
    "ddp": [],
    "zero1": ["state"],
    "zero2": ["gradients", "state"],
    "zero3": ["parameters", "gradients", "state"],
    **{mesh: ["parameters", "gradients", "state"] for mesh in MESHES},
}
KEPT = ("parameters", "gradients", "state")
LLAMA = {"hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 2816, "num_attention_heads": 16}
TOKENS = (2, 256)
UNITS, CHECKPOINTED = "zero3, llama: gathers a layer", "zero3, llama: activations with / without checkpointing"
GOALS = {f"{strategy}: {kind}": Goal(1.02) for strategy in DIVIDED for kind in KEPT} | {
    **{f"{pipeline}: activations": Goal(1.02) for pipeline in PIPELINES},
    UNITS: Goal(1),
    CHECKPOINTED: Goal(0.15),
}


class Deep(nn.Sequential):
    """Equal layers, without biases."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


class Kept:
    """Counts the bytes of activations that autograd keeps, each once.

    Attributes:
        most: The most there were at a time.
    """

    def __init__(self) -> None:
        self.most = 0
        self._counts: Counter[tuple[int, int]] = Counter()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Takes what autograd keeps."""
        if isinstance(tensor._base if tensor._base is not None else tensor, nn.Parameter):
            return tensor
        key = (tensor.data_ptr(), tensor.nbytes)
        self._counts[key] += 1
        self.most = max(self.most, sum(size for _, size in self._counts))
        held = _Held(tensor)
        weakref.finalize(held, self._drop, key)
        return held

    def unpack(self, packed: Any) -> torch.Tensor:
        """Returns the tensor that `pack` has taken."""
        tensor: torch.Tensor = packed.tensor if isinstance(packed, _Held) else packed
        return tensor

    def _drop(self, key: tuple[int, int]) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]


@dataclass(eq=False)
class _Held:
    tensor: torch.Tensor


def loss_of(module: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns the sum of the outputs."""
    return module(*batch.inputs).sum(), {}


def measure(context: RankContext, strategy: str) -> dict[str, int]:
    """Takes two steps as one rank; returns its bytes of parameters, gradients and optimizer state."""
    with context.plain_group():
        return two_steps(context.world, strategy)


def two_steps(world: World, strategy: str) -> dict[str, int]:
    """Takes the steps and measures; what trained is gone before the group is."""
    mesh = MESHES.get(strategy, {})
    options = {"min_parameters": WIDTH**2, **mesh} if mesh or strategy in ("zero2", "zero3") else {}
    config = TrainConfig(strategy="mesh" if mesh else strategy, strategy_params=options)
    shared, (kind, _) = build_strategy(config, world), strategy_for(config.strategy, options)
    plain = Recipe(module=Deep).build_module(seed=0)
    module = shared.prepare(plain, Start(example=lambda: Batch((torch.ones(2, WIDTH),), None, None, 2)))
    optimizer = shared.optimizer(Recipe(module=Deep), plain)
    batch, activations, parameters = Batch((torch.ones(ROWS, WIDTH),), None, None, ROWS), Kept(), 0
    for _ in range(2):
        optimizer.zero_grad()
        if kind.runs_passes:
            with torch.autograd.graph.saved_tensors_hooks(activations.pack, activations.unpack):
                shared.run_pass(module, batch, loss_of, 1.0, nullcontext())
            parameters = sum(local(p).nbytes for p in plain.parameters())
        else:
            loss, _ = loss_of(module, batch)
            parameters = sum(local(p).nbytes for p in plain.parameters())
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {
        "parameters": parameters,
        "gradients": sum(local(p.grad).nbytes for p in plain.parameters() if p.grad is not None),
        "state": sum(
            local(t).nbytes
            for s in own_optimizer(optimizer).state.values()
            for t in s.values()
            if isinstance(t, torch.Tensor)
        ),
        **({"activations": activations.most} if kind.runs_passes else {}),
    }


def llama(context: RankContext, recomputes: bool) -> dict[str, int]:
    """Takes two steps of a Llama as one rank; returns the activations that a forward pass keeps, and its gathers."""
    with context.plain_group():
        return steps_of_llama(context.world, recomputes)


def steps_of_llama(world: World, recomputes: bool) -> dict[str, int]:
    """Takes the steps and measures the second: in the first one, ranks also compare what they call."""
    options = {"activation_checkpointing": True} if recomputes else {}
    strategy = build_strategy(TrainConfig(strategy="zero3", strategy_params=options), world)
    module = strategy.prepare(LlamaModel(LlamaConfig(**LLAMA, vocab_size=100)), Start())
    gradients, figures = strategy.gradients(module), dict[str, int]()
    for _ in range(2):
        activations, before = Kept(), collectives_begun() or 0
        with gradients.reducing(rows=True):
            with torch.autograd.graph.saved_tensors_hooks(activations.pack, activations.unpack):
                loss = module(input_ids=torch.ones(TOKENS, dtype=torch.int64)).last_hidden_state.square().sum()
            figures = {"activations": activations.most, "gathers": (collectives_begun() or 0) - before}
            gradients.backward(loss, rows=True)
    return figures


def largest(size: int, strategy: str) -> dict[str, int]:
    """Runs the ranks and returns the largest figure of each kind."""
    with Ranks(size) as run:
        ranks = run(measure, strategy)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    samples: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    model = LAYERS * WIDTH * WIDTH * 4
    with workspace():
        for size, strategy in product(SIZES[:1] if options.quick else SIZES, DIVIDED):
            figures = largest(size, strategy)
            formula = {"parameters": model, "gradients": model, "state": 2 * model}
            parts = GROUP if strategy in MESHES else size
            formula |= {kind: formula[kind] // parts for kind in DIVIDED[strategy]}
            at_once = GROUP if strategy == "mesh, 1f1b" else MICRO_BATCHES
            formula["activations"] = LAYERS // GROUP * at_once * GROUP * ROWS // MICRO_BATCHES * WIDTH * 4
            for name, value in figures.items():
                samples[f"{strategy}, {size} ranks: {name}, MiB"] = [value / 2**20]
                apart = max(value, formula[name]) / max(1, min(value, formula[name]))
                ratios[f"{strategy}: {name}"] = max(apart, ratios.get(f"{strategy}: {name}", 0))
        with Ranks(GROUP) as run:
            plain, recomputed = run(llama, False)[0], run(llama, True)[0]
        for name, figures in {"kept": plain, "computed again": recomputed}.items():
            samples[f"zero3, llama, {GROUP} ranks: activations {name}, MiB"] = [figures["activations"] / 2**20]
        ratios[UNITS] = (plain["gathers"] - 1) / LLAMA["num_hidden_layers"]
        ratios[CHECKPOINTED] = recomputed["activations"] / plain["activations"]
    report("memory", samples=samples, ratios=ratios, goals=GOALS, facts=machine("torch"), path=options.json)


if __name__ == "__main__":
    main()
