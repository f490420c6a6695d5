"""The options of "mesh": the sizes of its dimensions, and how layers and stages are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sparktorch.base.config import at_least, one_of
from sparktorch.errors import ConfigError
from sparktorch.train.sharding.units import ShardingOptions
from sparktorch.train.tensor_parallel.styles import STYLES

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
            "sum_gradients"; empty for the plan that is known of the module. The output of a "colwise" layer is divided,
            as a "rowwise" one takes it. Or the import path of a function `(module, mesh) -> module`, which divides the
            module in place with torch's functions, such as `parallelize_module`.
    """

    data: int | None = None
    shard: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    stages_per_rank: int = 1
    split: list[str] = field(default_factory=list)
    micro_batches: int | None = None
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    plan: dict[str, str] | str = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*Sizes._fields, "stages_per_rank", "micro_batches"):
            value = getattr(self, name)
            if value is not None:
                at_least(f"strategyParams.{name}", value, 1)
        if not isinstance(self.plan, str):
            for pattern, style in self.plan.items():
                one_of(f"strategyParams.plan[{pattern!r}]", style, STYLES)
        one_of("strategyParams.schedule", self.schedule, ("1f1b", "gpipe"))
        self._check_each_other()

    def _check_each_other(self) -> None:
        """Refuses options that do not fit each other."""
        if not self._set_sizes():
            raise _clash(
                "strategy 'mesh' has no dimension",
                "strategyParams={'shard': n} divides the model among n workers, as many as a host has GPUs",
            )
        if self.plan and (self.tensor or 1) == 1:
            raise _clash(
                "strategyParams has plan, for layers that workers share, and there are no tensor ranks",
                "set strategyParams.tensor to the number of workers that share a layer",
            )
        if self.stacked > 1:
            self._check_pipeline()
        elif self.split or self.micro_batches or self.stages_per_rank > 1:
            raise _clash(
                "strategyParams has options of a pipeline, and no pipeline ranks",
                "set strategyParams.pipeline to the number of workers that have the layers one after another",
            )

    def _check_pipeline(self) -> None:
        interleaved, ranks = self.stages_per_rank > 1, self.stacked
        if isinstance(self.plan, str):
            raise _clash(
                "strategyParams.plan is a function, and strategyParams.pipeline divides a module before the function "
                "gets it",
                "give a plan by patterns of names",
            )
        if interleaved and self.schedule == "gpipe":
            raise _clash(
                "strategyParams.schedule is 'gpipe', and several stages of a rank take turns by '1f1b'",
                "leave schedule or stages_per_rank out",
            )
        if self.count < ranks and (self.schedule == "1f1b" or interleaved):
            raise _clash(
                f"strategyParams.micro_batches is {self.count}, and schedule '1f1b' keeps {ranks} ranks busy with at "
                f"least {ranks}",
                "set it to more, or schedule to 'gpipe'",
            )
        if interleaved and self.count % (self.count // ranks):
            raise _clash(
                f"strategyParams.micro_batches is {self.count}, and {ranks} ranks with several stages take turns",
                f"set it to a multiple of {ranks}",
            )

    @property
    def stacked(self) -> int:
        """Number of ranks that have the layers one after another."""
        return self.pipeline or 1

    @property
    def ranks_of_rows(self) -> int:
        """Number of ranks that compute on the same rows."""
        return (self.tensor or 1) * self.stacked

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
        left = workers // self.ranks_of_rows
        data = self.data or left // (self.shard or 1)
        shard = self.shard or left // data if data else 0
        if data * shard * tensor * pipeline == workers:
            return Sizes(data, pipeline, shard, tensor)
        sizes = " x ".join(f"{name} {value}" for name, value in self._set_sizes().items())
        possible = [size for size in range(1, workers + 1) if workers % size == 0]
        raise ConfigError(
            f"strategyParams has {sizes}, which {workers} workers cannot be divided into",
            hint=f"set one of them to {', '.join(map(str, possible))}, or change numWorkers",
            param="strategyParams",
            code="ST-MESH",
        )

    def _set_sizes(self) -> dict[str, int]:
        """Returns the sizes of the dimensions that are set."""
        return {name: getattr(self, name) for name in Sizes._fields if getattr(self, name) is not None}


def _clash(what: str, hint: str) -> ConfigError:
    return ConfigError(what, hint=hint, param="strategyParams", code="ST-MESH")
