"""Loops that users bring, importable by ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparktorch import RunContext
from sparktorch.errors import ConfigError
from tests.support.nets import Noisy, Score

__all__ = [
    *("batches", "by_hand", "drawing", "drawing_together", "left_early", "mean_of_gradients"),
    *("reduced_by_hand", "resumable", "sums", "two_modules", "wrapped"),
]


class Deep(nn.Sequential):
    """Layers whose gradients come in another order than they are made in, by which DDP arranges them."""

    def __init__(self) -> None:
        layers = [layer for _ in range(6) for layer in (nn.Linear(33, 33), nn.Tanh())]
        super().__init__(nn.Linear(5, 33), *layers, nn.Linear(33, 1), nn.Flatten(0))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.05)


def wrapped(context: RunContext, module: Callable[[], nn.Module] = Score) -> dict[str, torch.Tensor]:
    """A loop in which the lines that touch `context` differ from one for a single process."""
    net = module()
    net, optimizer = context.wrap(net, optimizer_of(net))
    for epoch in context.epochs:
        for batch in context.loader(epoch):
            x, y = batch
            loss = batch.mean((net(x) - y.float()) ** 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return context.state_dict(net)


def by_hand(context: RunContext) -> dict[str, torch.Tensor]:
    """The same with torch's DDP, which averages gradients over the ranks."""
    net = Score()
    ddp = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = optimizer_of(net)
    for epoch in context.epochs:
        for batch in context.loader(epoch):
            loss = batch.mean(nn.functional.mse_loss(ddp(batch.inputs[0]), batch.label.float(), reduction="none"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.state_dict() if context.rank == 0 else {}


def mean_of_gradients(context: RunContext) -> dict[str, torch.Tensor]:
    """The same without DDP: gradients are averaged by a collective; the loss is a mean over the rank's rows."""
    net = Score()
    optimizer = optimizer_of(net)
    for epoch in context.epochs:
        for batch in context.loader(epoch):
            optimizer.zero_grad()
            batch.mean(nn.functional.mse_loss(net(batch.inputs[0]), batch.label.float())).backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad = context.all_reduce(parameter.grad, "mean")
            optimizer.step()
    return net.state_dict()


def batches(context: RunContext) -> dict[str, Any]:
    """What a rank sees of its rows."""
    seen = [[batch.inputs[0][: batch.rows, 0].tolist() for batch in context.loader(epoch)] for epoch in context.epochs]
    data = context.dataset
    validated = [(batch.rows, batch.inputs[0][: batch.rows, 0].tolist()) for batch in context.validation(10)]
    inputs = [row[0][0].item() for row in torch.utils.data.DataLoader(data, batch_size=None)]
    few = torch.utils.data.DataLoader(data, batch_size=7)
    assert [x for batch in few for x in batch[0][:, 0].tolist()] == inputs
    return {"epochs": seen, "rows": len(data), "dataset": inputs, "steps": context.steps, "validation": validated}


def resumable(
    context: RunContext, folder: Path, rank: int, save_at: int, die_at: int, deep: bool = False
) -> dict[str, Any]:
    """A loop that saves after some steps, and in which one rank is killed the first time."""
    net = Deep() if deep else Noisy()
    net, optimizer = context.wrap(net, optimizer_of(net))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    steps, seen, loss = 0, 0, torch.zeros(())
    parts = {"net": net, "optimizer": optimizer, "schedule": schedule}
    if context.restored is not None:
        for name, part in parts.items():
            part.load_state_dict(context.restored[name])
        steps, seen = context.restored["steps"], context.restored["seen"]
    for epoch in context.epochs:
        for batch in context.loader(epoch):
            loss = batch.mean((net(batch.inputs[0]) - batch.label.float()) ** 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps, seen = steps + 1, seen + batch.rows
            if steps % save_at == 0:
                state = {name: part.state_dict() for name, part in parts.items()}
                context.save({**state, "steps": steps}, own={"seen": seen})
            if (context.rank, steps) == (rank, die_at) and not (folder / "killed").exists():
                (folder / "killed").touch()
                while not list((folder / "saved").rglob("manifest.json")):
                    time.sleep(0.01)  # on a busy machine, the background thread has not written it yet
                os.kill(os.getpid(), signal.SIGKILL)
        schedule.step()
        context.report(loss=loss)
    return {"state": context.state_dict(net), "steps": steps, "seen": seen, "resumed": context.restored is not None}


def drawing_together(context: RunContext, fails: bool) -> list[float]:
    """Draws a number in each step beside a module whose layers are divided, and fails after a save, if it is to."""
    context.wrap(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)))
    drawn: list[float] = [] if context.restored is None else context.restored["drawn"]
    for epoch in context.epochs:
        for _ in context.loader(epoch):
            drawn.append(float(torch.rand(())))
            if len(drawn) == 5:
                context.save({"drawn": drawn})
                if fails:
                    raise RuntimeError("after a save")
    return drawn


def left_early(context: RunContext) -> list[list[int]]:
    """The steps of loaders, of which some are left early or taken again."""
    first = [batch.step for batch, _ in zip(context.loader(0), range(3), strict=False)]
    return [first, *([batch.step for batch in context.loader(epoch)] for epoch in (0, 0, 1))]


def reduced_by_hand(context: RunContext) -> dict[str, Any]:
    """Uses the process group by hand, and returns a part of a large tensor."""
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return {"total": float(total), "own": torch.zeros(1_000_000)[:1]}


def two_modules(context: RunContext) -> dict[str, bool]:
    """Wraps two modules; the second is built after the generators have diverged."""
    context.wrap(nn.Linear(5, 5))
    second = nn.Linear(5, 5)
    first = context.all_gather(second.weight)[0]
    whole = context.state_dict(context.wrap(second))
    return {"equal": context.rank != 0 or torch.equal(whole["weight"], first)}


def drawing(context: RunContext, folder: Path) -> float:
    """Draws numbers, and saves after each; rank 0 is killed the first time, if there is something to save."""
    drawn, total = 0, 0.0
    torch.randn(3)  # as building a module does
    if context.restored is not None:
        drawn, total = context.restored["drawn"], context.restored["total"]
    context.continue_generators()
    while drawn < 6:
        drawn, total = drawn + 1, total + float(torch.randn(()))
        context.save({"drawn": drawn, "total": total})
        if (context.rank, drawn) == (0, 4) and folder.name == "killed" and not folder.exists():
            folder.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return total


def saving(context: RunContext) -> Any:
    """Saves, and raises at once if there is nothing to resume from."""
    if context.restored is None:
        context.report(loss=torch.ones((), requires_grad=True) * 2)
        context.save({"large": torch.zeros(1 << 20)} if context.rank == 0 else None)  # type: ignore[arg-type]
        raise ValueError("after a save")
    return len(context.restored["large"])


def sums(context: RunContext, what: str) -> Any:
    """Goes wrong in some way."""
    net = nn.Linear(5, 1)
    with pytest.raises(ConfigError, match=r"report\(epoch=...\): no metric can be called that"):
        context.report(epoch=1)
    with pytest.raises(ConfigError, match="Linear is no module that wrap returned"):
        context.state_dict(net)
    wrong: dict[str, Callable[[], Any]] = {
        "sharded": lambda: context.save({"weight": next(iter(context.wrap(net).parameters()))}),
        "alone": lambda: context.wrap(net),
        "exit": lambda: sys.exit(3),
        "module": lambda: context.save(net),  # type: ignore[arg-type]
        "early": lambda: None if context.rank == 0 else context.barrier(),
        "saves": lambda: (context.rank == 0 and context.save({}), next(iter(context.loader(0)))),
        "result": threading.Lock,
    }
    return wrong[what]()
