"""Networks for ranks and artifacts without Spark: importable, so that they travel by name."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Mlp(nn.Module):
    """Two smooth layers, so that float noise stays noise; scores of shape `(rows, outputs)`."""

    def __init__(self, inputs: int = 5, outputs: int = 3, hidden: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out

    def stages(self) -> list[nn.Module]:
        return list(self.layers)


class Score(Mlp):
    """One number a row, shape `(rows,)`."""

    def __init__(self, inputs: int = 5, hidden: int = 8) -> None:
        super().__init__(inputs, 1, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze(-1)

    def stages(self) -> list[nn.Module]:
        return [*super().stages(), nn.Flatten(0)]


class Logit(Mlp):
    """One number a row, shape `(rows, 1)`."""

    def __init__(self, inputs: int = 5) -> None:
        super().__init__(inputs, 1)


class Pair(nn.Module):
    """Two inputs, and a tuple of two outputs of unequal shapes."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.left = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = self.left(x) * scale[:, None]
        return left, left.sum(1)


class NamedPair(nn.Module):
    """`Pair`, its outputs by name."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.pair = Pair(width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        left, total = self.pair(x, scale)
        return {"left": left, "total": total}


class Seen(Score):
    """Writes down the first feature of the rows of each training step, a line a step, one file a rank."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and dist.is_initialized():
            with (self._folder / f"steps-{dist.get_rank()}").open("a") as file:
                file.write(" ".join(str(int(number)) for number in x[:, 0]) + "\n")
        return super().forward(x)


class Sized(Mlp):
    """Writes down how many rows each forward pass in evaluation has, one file a rank."""

    def __init__(self, folder: str, outputs: int = 3) -> None:
        super().__init__(outputs=outputs)
        self._folder = Path(folder)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and dist.is_initialized():
            with (self._folder / f"rows-{dist.get_rank()}").open("a") as file:
                file.write(f"{len(x)}\n")
        return super().forward(x)


class Drifting(Score):
    """Looks at running statistics in training too; a part of them is in no state dict."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("turns", torch.zeros(2, dtype=torch.complex128), persistent=False)  # no file takes these

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.calls += 1
        return super().forward(x - self.mean) * (1 + torch.sin(self.calls) / 10)


class Spare(Score):
    """Has a layer that `forward` never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Logarithm(Score):
    """Takes no zeros: their output and its gradient are not finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.abs().log())


class Normalised(Mlp):
    """Normalises over the batch, which takes two rows at least."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class NormalisedLogarithm(Normalised):
    """Takes no zeros: they spoil the running statistics too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.abs().log())


class Counting(Score):
    """Keeps in its state how often it ran, and how many collectives its group had seen by then."""

    def __init__(self) -> None:
        super().__init__()
        # Buffers would be sent around before each forward.
        self.forwards = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.collectives = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.forwards += 1
                self.collectives.fill_(dist.distributed_c10d._get_default_group()._get_sequence_number_for_group())
        return super().forward(x)


class Watched(Score):
    """Writes down when each rank takes a training step, and which weights it validates; one rank is slow."""

    def __init__(self, folder: str, slow: int = -1, seconds: float = 0.0) -> None:
        super().__init__()
        self._folder, self._slow, self._seconds = Path(folder), slow, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank() if dist.is_initialized() else None
        if rank is not None and self.training:
            self._note(f"steps-{rank}", repr(time.monotonic()))
            time.sleep(self._seconds if rank == self._slow else 0)
        elif rank is not None:
            weights = b"".join(value.cpu().numpy().tobytes() for value in self.state_dict().values())
            self._note(f"weights-{rank}", hashlib.sha256(weights).hexdigest())
        return super().forward(x)

    def _note(self, name: str, line: str) -> None:
        with (self._folder / name).open("a") as file:
            file.write(line + "\n")


class Bias(nn.Module):
    """One parameter, trainable or frozen."""

    def __init__(self, *, trainable: bool = True) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()), requires_grad=trainable)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) + self.bias


class FailsAt(Mlp):
    """Raises on one rank, at one step of the training counted from 1."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__()
        self._rank, self._step, self._seen = rank, step, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._seen += self.training
        if self._seen == self._step and dist.is_initialized() and dist.get_rank() == self._rank:
            self.fail()
        return super().forward(x)

    def fail(self) -> None:
        raise ArithmeticError("planted in forward")


class DiesAt(FailsAt):
    """Is killed on one rank, at one step, as the out-of-memory killer would."""

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class DiesWithin(Mlp):
    """Large, and killed on one rank some seconds into training, whatever that rank is doing then."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(hidden=300_000)
        self._rank, self._seconds, self._seen = rank, seconds, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._seen and dist.is_initialized() and dist.get_rank() == self._rank:
            threading.Timer(self._seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        self._seen = True
        return super().forward(x)


class Unsteady(torch.optim.SGD):
    """Fails at its tenth step."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == 10:
            raise ArithmeticError("planted in the optimizer")
        super().step()


class Damped(torch.optim.Optimizer):
    """Steps get smaller; it keeps their number as Python does, and no tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                parameter.sub_(group["lr"] / state["steps"] * parameter.grad)


class Lookup(nn.Module):
    """A number for each of eight kinds of rows, whose gradient is sparse; shape `(rows,)`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 1, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = (x[:, :3] > 0).long() @ torch.tensor([1, 2, 4], device=x.device)
        return self.table(kind).squeeze(-1) + x[:, 3]


class Parted(Score):
    """Has a layer that one rank alone reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first_only = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        alone = self.training and dist.get_rank() == 0
        return found + self.first_only(x).squeeze(-1) if alone else found


class Branched(Score):
    """Has a layer, and a table with sparse gradients, that few rows use."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.extra = nn.Linear(5, 1)
        if sparse:
            self.table = nn.Embedding(3, 1, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, few = super().forward(x), x[:, 0] > 0.9
        if not few.any():
            return found
        more = self.extra(x[few]).squeeze(-1)
        if hasattr(self, "table"):
            more = more + self.table((x[few, 1] > 0).long()).squeeze(-1)
        return found.masked_scatter(few, found[few] + more)


class Routed(Score):
    """Has two experts of one size, of which each rank's rows use one, after some passes in training."""

    def __init__(self, after: int = 0, mixes: bool = False) -> None:
        super().__init__()
        self.mixes = mixes
        self.experts = nn.ModuleList(nn.Linear(5, 1) for _ in range(2))
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.after -= torch.is_grad_enabled()
        expert = dist.get_rank() % 2 if self.after < 0 else self.after % 2 * self.mixes
        found: torch.Tensor = super().forward(x) + self.experts[expert](x).squeeze(-1)
        return found


class Fourier(nn.Module):
    """Draws random frequencies that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(5, 8), persistent=False)
        self.phases = torch.rand(8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cos(x @ self.frequencies + self.phases)).squeeze(-1)


class Rotated(Score):
    """Has a complex parameter, and one of double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x * self.phase).abs() * self.scale.float())


class Linear(nn.Linear):
    """One number a row, shape `(rows, 1)`, and linear in its parameters."""

    def __init__(self) -> None:
        super().__init__(5, 1)


def mean_output_error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """One squared error a row, of the mean of the module's outputs."""
    return (output.mean(1) - label) ** 2


def output_times_label(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Its gradient with respect to a linear module's parameters does not depend on them."""
    return output * label


def mean_cross_entropy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return -output.log_softmax(1)[torch.arange(len(output), device=output.device), label].mean()


def not_a_module() -> int:
    return 3


class Tower(nn.Module):
    """Layers of odd widths, a tied one, a frozen one and a buffer; smooth, one number a row."""

    def __init__(self, inputs: int = 5) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(inputs, 9), nn.Tanh())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(2))
        self.tied = nn.Linear(9, 9, bias=False)
        self.tied_again = nn.Linear(9, 9, bias=False)
        self.tied_again.weight = self.tied.weight
        self.last = nn.Linear(9, 1)
        self.frozen = nn.Parameter(torch.full((7,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.tensor(0.25))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.frozen, 0.5)
        nn.init.constant_(self.shift, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.tied_again(torch.tanh(self.tied(x))) * self.frozen.mean() + self.shift
        out: torch.Tensor = self.last(x).squeeze(-1)
        return out

    def stages(self) -> list[nn.Module]:
        def middle(x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
            return self.tied_again(torch.tanh(self.tied(x))) * frozen.mean() + self.shift

        blocks = [Unit(lambda x, block=block: x + block(x), block) for block in self.blocks]
        both = Unit(middle, self.tied, self.tied_again, frozen=self.frozen)
        return [self.first, *blocks, both, nn.Sequential(self.last, nn.Flatten(0))]


class Paired(nn.Module):
    """Pairs of layers that tensor parallelism divides, and a norm and a buffer that it does not; one number a row."""

    def __init__(self, inputs: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 6), nn.Dropout(dropout))
        self.norm = nn.LayerNorm(6)
        self.second = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, 1))
        self.register_buffer("shift", torch.tensor(0.25))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.shift, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.norm(self.first(x)))).squeeze(-1) + self.shift
        return out

    def stages(self) -> list[nn.Module]:
        shifted = Unit(lambda x: x.squeeze(-1) + self.shift)
        return [*self.first, nn.Sequential(self.norm, nn.Tanh()), *self.second, shifted]


class Unit(nn.Module):
    """A unit of a pipeline that calls a function, which computes with some modules."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module, **parameters: nn.Parameter) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(parts), function
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, *values: torch.Tensor) -> Any:
        return self.function(*values, **dict(self.named_parameters(recurse=False)))


class Chain(nn.Module):
    """Layers in a list, a parameter between them, a mask, a layer that nobody calls; a value that skips layers."""

    def __init__(self, skips: bool = False, dropout: float = 0.0, unused: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.enter = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout)) for _ in range(3))
        self.out = nn.Linear(8, 1)
        self.unused = nn.Linear(unused, 2)
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x.abs() < 2).float().mean(1, keepdim=True)
        first = out = self.enter(x) * self.scale
        for layer in self.layers:
            out = out + mask * torch.tanh(layer(out))
        result: torch.Tensor = self.out(out + first if self.skips else out).squeeze(-1)
        return result

    def stages(self) -> list[nn.Module]:
        def enter(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
            out = self.enter(x) * scale
            return out, out if self.skips else torch.zeros(len(x)), (x.abs() < 2).float().mean(1, keepdim=True)

        def deeper(layer: nn.Module) -> Unit:
            return Unit(lambda out, first, mask: (out + mask * torch.tanh(layer(out)), first, mask), layer)

        def last(out: torch.Tensor, first: torch.Tensor, mask: torch.Tensor) -> Any:
            return self.out(out + first if self.skips else out).squeeze(-1)

        layers = map(deeper, self.layers)
        return [Unit(enter, self.enter, scale=self.scale), *layers, Unit(last, self.out, self.unused)]


class Bags(nn.Module):
    """The mean of embeddings from a table, each weighed by its place among five."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 4).long().clamp(max=11)
        places = torch.arange(1.0, 6.0, device=x.device)
        out: torch.Tensor = self.out((self.table(ids) * places[:, None]).mean(1)).squeeze(-1)
        return out


class Noisy(Tower):
    """A tower that draws random numbers, and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.dropout(self.norm(x)))


class Gated(nn.Module):
    """A parameter of its own between two layers, of which each rank sees a part."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(5, 8), nn.PReLU(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.act(self.fc1(x))).squeeze(-1)
        return out
