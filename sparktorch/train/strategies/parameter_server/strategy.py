"""Parameter server: each rank pushes gradients and pulls parameters at its own pace, up to a bound.

Dean et al. 2012, Large Scale Distributed Deep Networks (asynchronous updates); Li et al. 2014, Scaling
Distributed Machine Learning with the Parameter Server (a model spread over servers); Ho et al. 2013, More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (the bound).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.config import at_least
from sparktorch.base.devices import is_host, wait_for
from sparktorch.base.world import World
from sparktorch.distributed.process_group import attach, sum_over_ranks
from sparktorch.errors import ConfigError
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.base import (
    GradientsOfRows,
    GradientSync,
    Job,
    Kind,
    Start,
    Strategy,
    broadcast,
    check_optimizer_class,
)
from sparktorch.train.strategies.parameter_server.server import (
    Connection,
    Message,
    ParameterShare,
    assign,
    connect,
    read_numbers,
)

__all__ = ["KIND"]


@dataclass(frozen=True, kw_only=True)
class ParameterServerOptions:
    """Options of `parameterServer`.

    Attributes:
        staleness: Steps that a rank may be ahead of the slowest rank. With 0, all ranks take each step together; with
            `None`, no rank waits.
        servers: Number of ranks that also serve a share of the parameters; `None`, or more than there are ranks, means
            all.
    """

    staleness: int | None = None
    servers: int | None = 1

    def __post_init__(self) -> None:
        if self.staleness is not None:
            at_least("strategyParams.staleness", self.staleness, 0)
        if self.servers is not None:
            at_least("strategyParams.servers", self.servers, 1)


class ParameterServer(Strategy[ParameterServerOptions]):
    """Ranks push gradients to servers, which hold parameters and optimizer, and pull the parameters.

    Servers run in some of the ranks, and hold whole tensors in host memory. They use separate connections, so that
    their traffic does not mix with the loop's collectives. As in all strategies, a gradient is scaled to be an estimate
    of the whole batch's; `ParameterShare` describes the updates.
    """

    _exchange: _Exchange | None = None

    def prepare(self, module: nn.Module, start: Start) -> nn.Module:
        """Broadcasts rank 0's initial parameters and buffers; returns the module unwrapped."""
        module.to(self._device)
        broadcast([*module.parameters(), *module.buffers()], self._world)
        return module

    def gradients(self, module: nn.Module) -> GradientSync:
        """Returns what leaves gradients to the pushes; a rank without rows pushes none."""
        return GradientsOfRows(module, self._world.world_size)

    def optimizer(self, recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
        """Starts this rank's server, if it hosts one; returns an optimizer whose step is a push and a pull."""
        optimizer = recipe.build_optimizer(module)
        if self._alone:
            return optimizer
        groups = optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        ranks = self._world.world_size
        count = min(self._options.servers or ranks, ranks, len(parameters))
        server = assign([parameter.nbytes for parameter in parameters], count)
        # Neighbouring ranks tend to share a host: spread the servers evenly over the ranks.
        shares = {
            i * ranks // count: [p for p, s in zip(parameters, server, strict=True) if s == i] for i in range(count)
        }
        own = shares.get(self._world.rank)
        share = None if own is None else self._share(recipe, module, groups, own)
        self._exchange = _Exchange(self._world, shares, share, numbers=len(read_numbers(groups)))
        attach(self._exchange)
        return _Pushing(optimizer, self._exchange.step)

    def _share(
        self, recipe: Recipe, module: nn.Module, groups: list[dict[str, Any]], parameters: list[nn.Parameter]
    ) -> ParameterShare:
        """Returns the share that serves some parameters; its optimizer has the options of the whole model's."""
        masters = {p: nn.Parameter(p.detach().to("cpu", copy=True).contiguous()) for p in parameters}
        factory, _, options = recipe.optimizer_call(module)
        optimizer = factory(
            [{**group, "params": [masters[p] for p in group["params"] if p in masters]} for group in groups],
            **options,
        )
        return ParameterShare(
            list(masters.values()), optimizer, ranks=self._world.world_size, staleness=self._options.staleness
        )

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """As in the base class; unless staleness is 0, ranks first wait for all pushes and pull the parameters."""
        if self._exchange is not None and self._options.staleness != 0:
            self._exchange.pull_together()
        with super().evaluating(module) as plain:
            yield plain

    def metrics(self) -> dict[str, float]:
        """Returns the mean and the largest staleness of an epoch's pushes, as from `ParameterShare.take_staleness`."""
        share = None if self._exchange is None else self._exchange.share
        stale = [] if share is None else share.take_staleness()
        counts = torch.zeros(2 + self._world.world_size, dtype=torch.float64)
        counts[0], counts[1], counts[2 + self._world.rank] = sum(stale), len(stale), max(stale, default=0)
        total, pushes, *most = sum_over_ranks(counts, self._world).tolist()
        return {"staleness_mean": total / max(pushes, 1), "staleness_max": max(most)}


class _Pushing(torch.optim.Optimizer):
    """An optimizer whose step is a push; the changing options of its groups are sent with each push."""

    def __init__(self, whole: torch.optim.Optimizer, push: Callable[[list[dict[str, Any]]], None]) -> None:
        super().__init__(whole.param_groups, whole.defaults)
        self._push = push

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        self._push(self.param_groups)


class _Exchange:
    """One rank's connections to all servers, and the threads of the server that it hosts, if any."""

    def __init__(
        self, world: World, parameters: dict[int, list[nn.Parameter]], share: ParameterShare | None, *, numbers: int
    ) -> None:
        """Takes this rank's copies of each server's parameters, by the server's rank, and the share that it serves."""
        self._world, self._parameters, self.share = world, parameters, share
        pinned = not is_host(world.device)
        self._frames = {server: Message(own, numbers, pinned=pinned) for server, own in parameters.items()}
        self._ups, self._downs = connect(world, list(parameters))
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(peer, line, Message(parameters[world.rank], numbers)),
                name=f"sparktorch-server-of-{peer}",
                daemon=True,
            )
            for peer, line in self._downs.items()
        ]

    def __enter__(self) -> _Exchange:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        found = error
        try:
            for server, line in self._ups.items() if error is None else ():
                self._frames[server].end()
                line.send(self._frames[server].bytes)
        except dist.DistError as gone:
            found = gone
        if found is not None:
            self._stop(found)
        for thread in self._threads:
            thread.join()
        for line in self._ups.values():
            line.close()
        if self.share is not None:
            found = self.share.failure
        if found not in (None, error) and isinstance(error, RuntimeError | None):
            raise found  # an existing error is of a collective whose peers left because of this one

    def step(self, groups: list[dict[str, Any]]) -> None:
        """Pushes the gradients and the groups' options to all servers, and sets the parameters to what they reply."""
        numbers = read_numbers(groups)
        for server, frame in self._frames.items():
            frame.push(numbers, [parameter.grad for parameter in self._parameters[server]])
        wait_for(self._world.device)  # once for all gradients' copies to the host
        for server, line in self._ups.items():
            line.send(self._frames[server].bytes)
        if self.share is not None:
            self.share.push(self._world.rank, self._frames[self._world.rank])
        for server, line in self._ups.items():
            line.receive(self._frames[server].bytes)
        for server, frame in self._frames.items():
            frame.load(self._parameters[server])

    def pull_together(self) -> None:
        """Sets every rank's parameters to those of the servers, after the pushes of all ranks."""
        dist.barrier()
        wait_for(self._world.device)  # the device may still copy from the frames
        for server, frame in self._frames.items():
            if server == self._world.rank and self.share is not None:
                self.share.read(frame)
            dist.broadcast(frame.bytes, server)
            frame.load(self._parameters[server])

    def _serve(self, peer: int, line: Connection, frame: Message) -> None:
        """Answers one rank's pushes until its last message."""
        assert self.share is not None
        try:
            while True:
                line.receive(frame.bytes)
                if frame.last:
                    return
                self.share.push(peer, frame)
                line.send(frame.bytes)
        except BaseException as error:
            self._stop(error)
        finally:
            line.close()

    def _stop(self, error: BaseException) -> None:
        """Wakes the threads that wait for a reply, in this rank and in others, with an error."""
        if self.share is not None:
            self.share.fail(error)
        for line in (*self._ups.values(), *self._downs.values()):
            line.shut()


def _is_asynchronous(options: ParameterServerOptions) -> bool:
    return options.staleness != 0


def _check_settings(job: Job) -> None:
    """Refuses settings that need all ranks in step."""
    check_optimizer_class(job, "server")
    config, asynchronous = job.config, _is_asynchronous(job.options)
    if config.precision == "fp16":
        raise _clash("precision", "precision 'fp16'", "a worker skips a step whose gradient overflows")
    if config.non_finite == "skip":
        raise _clash("nonFiniteLoss", "nonFiniteLoss 'skip'", "workers leave out the same steps")
    if config.sync_batch_norm:
        raise _clash("syncBatchNorm", "syncBatchNorm", "workers wait for each other in forward passes")
    if config.deterministic and asynchronous:
        raise _clash("deterministic", "deterministic", "updates come in another order each time")
    if config.ema_decay and asynchronous:
        raise _clash("emaDecay", "emaDecay", "each worker sees other weights")


def _clash(param: str, setting: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{setting} does not go together with strategy 'parameterServer': {reason}",
        hint="use another strategy; deterministic and emaDecay go together with strategyParams={'staleness': 0}",
        param=param,
        code="ST-STRATEGY",
    )


KIND = Kind(
    options=ParameterServerOptions,
    rank=ParameterServer,
    check_settings=_check_settings,
    asynchronous=_is_asynchronous,
    resumable=False,
    waits_for_device=True,
)
