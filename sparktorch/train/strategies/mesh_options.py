"""The options of "mesh": the sizes of its dimensions, and how layers and stages are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sparktorch.base.config import at_least, one_of
from sparktorch.errors import ConfigError, Refusal, refuse
from sparktorch.train.sharding.units import ShardingOptions
from sparktorch.train.tensor_parallel.styles import OWN_ROWS, STYLES

__all__ = ["MeshOptions", "Sizes"]


class Sizes(NamedTuple):
    """The sizes of a mesh's dimensions, the outermost first."""

    data: int
    pipeline: int
    shard: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class MeshOptions(ShardingOptions):
    """Options of `mesh`, besides those of `zero3`.

    Attributes:
        data: Number of groups, each with a copy of the model; `None` for as many as there are ranks for.
        shard: Number of ranks of a group among which parameters are sharded; `None` for as many as `data` leaves, or
            1 without `data`.
        tensor: Number of ranks among which layers are divided, which compute on the same rows; `None` for 1.
        pipeline: Number of ranks that have the module's layers one after another, and pass micro-batches on; `None` for
            1.
        stages_per_rank: Number of stages of each of these ranks; with more than 1, the schedule is interleaved.
        split: Names of the layers that stages begin with, but for the first; empty for a balance of parameters.
        micro_batches: Number of micro-batches into which the rows of these ranks are divided; `None` for 4 times
            `pipeline`.
        schedule: "1f1b" runs the backward pass of a micro-batch as soon as it can; "gpipe" runs all forward passes
            first, and keeps the activations of all micro-batches.
        plan: How layers are divided, by globs of their names: "colwise", "rowwise", "colwise_gather_output" or
            "colwise_own_rows", and attention by "heads"; empty for the plan that is known of the module. The output of
            a "colwise" layer is divided, as a "rowwise" one takes it.
        sequence: Whether each of the ranks that share layers has a part of the sequences between these layers, in
            torch's transformer layers.
        recompute_allgather: Whether a layer that takes all of such a sequence gathers it again backward, instead of
            keeping it.
    """

    data: int | None = None
    shard: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    stages_per_rank: int = 1
    split: list[str] = field(default_factory=list)
    micro_batches: int | None = None
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    plan: dict[str, str] = field(default_factory=dict)
    sequence: bool = False
    recompute_allgather: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self._given().items():
            at_least(f"strategyParams.{name}", value, 1)
        for pattern, style in self.plan.items():
            one_of(f"strategyParams.plan[{pattern!r}]", style, STYLES)
        one_of("strategyParams.schedule", self.schedule, ("1f1b", "gpipe"))
        at_least("strategyParams.stages_per_rank", self.stages_per_rank, 1)
        if self.micro_batches is not None:
            at_least("strategyParams.micro_batches", self.micro_batches, 1)
        refuse(_REFUSALS, self)

    @property
    def stacked(self) -> int:
        """Number of ranks that have the layers one after another."""
        return self.pipeline or 1

    @property
    def stages(self) -> int:
        """Number of stages of a pipeline."""
        return self.stacked * self.stages_per_rank

    @property
    def count(self) -> int:
        """Number of micro-batches in a pipeline."""
        return self.micro_batches or 4 * self.stacked

    @property
    def bubble(self) -> float:
        """Share of the time that a rank of a pipeline is idle if all stages take equally long.

        Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), section 2.2.
        """
        wait = (self.stacked - 1) / self.stages_per_rank
        return wait / (self.count + wait)

    def sizes(self, workers: int) -> Sizes:
        """Returns the sizes of the dimensions.

        Raises:
            ConfigError: They do not multiply to the number of workers.
        """
        tensor, pipeline = self.tensor or 1, self.stacked
        left = workers // (tensor * pipeline)
        data = self.data or left // (self.shard or 1)
        shard = self.shard or left // data if data else 0
        if data * shard * tensor * pipeline == workers:
            return Sizes(data, pipeline, shard, tensor)
        given = " x ".join(f"{name} {value}" for name, value in self._given().items())
        possible = [size for size in range(1, workers + 1) if workers % size == 0]
        raise ConfigError(
            f"strategyParams has {given}, which {workers} workers cannot be divided into",
            hint=f"set one of them to {', '.join(map(str, possible))}, or change numWorkers",
            param="strategyParams",
            code="ST-MESH",
        )

    def _given(self) -> dict[str, int]:
        """Returns the dimensions that are set."""
        return {name: value for name in Sizes._fields if (value := getattr(self, name)) is not None}


# Options that do not fit each other: when, what is wrong, and what to do.
_CLASHES: Sequence[tuple[Callable[[MeshOptions], object], str, str]] = (
    (
        lambda p: not (p.sequence or p.recompute_allgather),
        "strategyParams.recompute_allgather is False, and has no effect without strategyParams.sequence",
        "set sequence to True, or leave recompute_allgather out",
    ),
    (
        lambda p: p.sequence and (p.stacked > 1 or p.plan),
        "strategyParams.sequence does not work with strategyParams.pipeline or plan",
        "leave sequence out, or these",
    ),
    (
        lambda p: (p.sequence or p.plan) and (p.tensor or 1) == 1,
        "strategyParams has sequence or plan, for layers that workers share, and there are no tensor ranks",
        "set strategyParams.tensor to the number of workers that share a layer",
    ),
    (
        lambda p: not p._given(),
        "strategy 'mesh' has no dimension",
        "strategyParams={{'shard': n}} divides the model among n workers, as many as a host has GPUs",
    ),
    (
        lambda p: p.stacked == 1 and (p.split or p.micro_batches or p.stages_per_rank > 1),
        "strategyParams has options of a pipeline, and no pipeline ranks",
        "set strategyParams.pipeline to the number of workers that have the layers one after another",
    ),
    (
        lambda p: p.stacked > 1 and OWN_ROWS in p.plan.values(),
        f"strategyParams.plan has {OWN_ROWS!r}, and the last stage of a pipeline computes the loss of all rows",
        "use 'colwise_gather_output' there",
    ),
    (
        lambda p: p.stages_per_rank > 1 and p.schedule == "gpipe",
        "strategyParams.schedule is 'gpipe', and several stages of a rank take turns by '1f1b'",
        "leave schedule or stages_per_rank out",
    ),
    (
        lambda p: p.stacked > 1 and p.count < p.stacked and (p.schedule == "1f1b" or p.stages_per_rank > 1),
        "strategyParams.micro_batches is {p.count}, and schedule '1f1b' keeps {p.stacked} ranks busy with at least "
        "{p.stacked}",
        "set it to more, or schedule to 'gpipe'",
    ),
    (
        lambda p: p.stages_per_rank > 1 and p.count % (p.count // p.stacked),
        "strategyParams.micro_batches is {p.count}, and {p.stacked} ranks with several stages take turns",
        "set it to a multiple of {p.stacked}",
    ),
)
_REFUSALS = tuple(Refusal("strategyParams", *clash, "ST-MESH") for clash in _CLASHES)
