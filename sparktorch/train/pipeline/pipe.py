"""A module whose stages are on different ranks: torch's schedules pass micro-batches through them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.devices import is_host
from sparktorch.train.dtensor import whole
from sparktorch.train.pipeline.recording import Recording, Twin
from sparktorch.train.pipeline.stages import Program, Stage, programs

__all__ = ["Arguments", "MicroLoss", "Pipe"]

# Returns the loss of the output for the rows from the first to the second number.
MicroLoss = Callable[[Any, int, int], torch.Tensor]


@dataclass(frozen=True)
class Arguments:
    """What a module is called with.

    Attributes:
        values: All arguments, flattened.
        spec: How they were nested.
        places: Which of them are tensors with rows.
    """

    values: list[Any]
    spec: Any
    places: list[int]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Takes the arguments of a call."""
        values, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        return cls(
            values, spec, [i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.dim()]
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with rows."""
        return [self.values[place] for place in self.places]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.tensors[0])

    @property
    def form(self) -> str:
        """All but the tensors, as text."""
        return repr(([None if i in self.places else value for i, value in enumerate(self.values)], self.spec))

    def call(self, module: nn.Module, *tensors: torch.Tensor) -> Any:
        """Calls a module with other tensors in place of these."""
        values = list(self.values)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return module(*args, **kwargs)


@dataclass
class _Prepared:
    """What this rank runs for inputs of some shapes.

    Attributes:
        schedule: Torch's schedule.
        programs: The program of each of this rank's stages.
        outputs: Shape and dtype of the outputs of a micro-batch.
        recording: The forward pass.
        used: Whether the schedule has run.
    """

    schedule: Any
    programs: list[Program]
    outputs: list[torch.Tensor]
    recording: Recording
    used: bool = False


class Pipe(nn.Module):
    """A module divided into stages, one after another on the ranks of a group.

    All ranks of the group have the same rows. A forward pass without gradients returns the output in every rank; with
    gradients, `train_rows` runs forward and backward.

    Attributes:
        module: The user's module, of which this rank has the parameters of its stages.
        stages: This rank's stages.
        twin: The module with all of its parameters, without values.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Stage],
        twin: Twin,
        layers: Sequence[str],
        stage_of: Mapping[str, int],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        schedule: str,
        micro_batches: int,
    ) -> None:
        """Takes the parts.

        Args:
            module: The user's module.
            stages: This rank's stages, in ascending order.
            twin: Records forward passes.
            layers: Names of the layers that are called as they are.
            stage_of: The stage of each layer, and of each parameter between them.
            group: The ranks of the stages.
            device: This rank's device.
            schedule: As in `MeshOptions.schedule`.
            micro_batches: Number of micro-batches.
        """
        super().__init__()
        self.module, self.stages = module, nn.ModuleList(stages)
        self._own = list(stages)
        self.twin, self._layers, self._stage_of = twin, layers, stage_of
        self._group, self._device = group, device
        self._schedule, self._micro_batches = schedule, micro_batches
        self._prepared: dict[Any, _Prepared] = {}
        self._most_rows = 0
        self._clock = _Clock(active=is_host(device))

    @property
    def _count(self) -> int:
        return len(self._own) * self._group.size()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of all rows."""
        given = Arguments.of(args, kwargs)
        padded, size = self._padded(given.tensors, given.rows)
        prepared = self._prepare(given, padded, size, training=False)
        outputs = prepared.schedule.step(**_named(padded))
        found = []
        for place, meta in enumerate(prepared.outputs):
            if outputs is None:
                shape = (size * self._micro_batches, *meta.shape[1:])
                every = torch.empty(shape, dtype=meta.dtype, device=self._device)
            else:
                every = outputs[place].contiguous()
            # As bytes, for backends do not take every dtype.
            source = self._group.size() - 1
            dist.broadcast(every.view(-1).view(torch.uint8), group=self._group, group_src=source)
            found.append(every[: given.rows])
        return _nested(prepared.recording, found)

    def train_rows(
        self, given: Arguments, loss: MicroLoss, scale: float, autocast: AbstractContextManager[Any]
    ) -> torch.Tensor:
        """Runs forward and backward on rows that all ranks of the group have.

        Args:
            given: Arguments of the module.
            loss: Returns the loss of a micro-batch, and is called in the last stage.
            scale: Factor of the loss.
            autocast: Context of a forward pass.

        Returns:
            The sum of the losses, without the factor, the same in all ranks.
        """
        rows = given.rows
        self._most_rows = max(self._most_rows, rows)
        padded, size = self._padded(given.tensors, self._most_rows)
        with autocast:
            prepared = self._prepare(given, padded, size, training=True)
        total = torch.zeros((), device=self._device)

        def of_micro_batch(outputs: Any, target: torch.Tensor) -> torch.Tensor:
            nonlocal total
            first = int(target[0])
            kept = min(first + size, rows) - first
            if kept <= 0:  # nothing but padding
                return sum((output.sum() * 0 for output in outputs if output.requires_grad), torch.zeros_like(total))
            found = loss(_nested(prepared.recording, [output[:kept] for output in outputs]), first, first + kept)
            total = total + found.detach()
            return found * scale

        prepared.schedule._loss_fn = of_micro_batch
        with self._clock.running(), _accumulating(self.stages, fresh=not prepared.used):
            places = torch.arange(size * self._micro_batches)
            prepared.schedule.step(target=places, return_outputs=False, **_named(padded))
        prepared.used = True
        prepared.schedule._loss_fn = _no_loss
        dist.all_reduce(total, group=self._group)
        return total

    def whole_state(self, leave_out: Collection[str]) -> dict[str, torch.Tensor]:
        """Returns the whole module's state dict on the CPU in rank 0; an empty one in other ranks.

        Args:
            leave_out: Names of tensors to leave out.
        """
        first = 0 in dist.get_process_group_ranks(self._group)
        main = dist.get_rank() == 0
        own, found = self.module.state_dict(), dict[str, torch.Tensor]()
        for name, meta in self.twin.module.state_dict().items():
            source = self._rank_of(name)
            here = source == self._group.rank()
            tensor = whole(own[name].detach()) if here else None  # a collective of the stage's ranks
            if not first or name in leave_out:
                continue
            if source and here:
                assert tensor is not None
                dist.send(tensor.to(self._device).contiguous(), group=self._group, group_dst=0)
            elif source and main:
                tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
                dist.recv(tensor, group=self._group, group_src=source)
            if main:
                assert tensor is not None
                found[name] = tensor.to("cpu", copy=True)
        return found

    def _rank_of(self, name: str) -> int:
        """Returns the rank in the group that has a parameter or buffer; the first for buffers between layers."""
        parts = name.split(".")
        paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return next((self._stage_of[path] for path in paths if path in self._stage_of), 0) % self._group.size()

    def idle(self) -> tuple[float, float]:
        """Returns the seconds this rank was idle in schedules since the last call, and their seconds; zeros on GPUs."""
        return self._clock.read()

    @property
    def bubble(self) -> float:
        """The share of the time that a rank is idle if all stages take equally long (Narayanan et al. 2021)."""
        wait = (self._group.size() - 1) / len(self._own)
        return wait / (self._micro_batches + wait)

    def _padded(self, tensors: Sequence[torch.Tensor], rows: int) -> tuple[list[torch.Tensor], int]:
        """Returns the tensors with as many rows as the micro-batches have, the last row again and again; and theirs."""
        size = math.ceil(rows / self._micro_batches)
        missing = size * self._micro_batches - len(tensors[0])
        if not missing:
            return list(tensors), size
        return [torch.cat([each, each[-1:].expand(missing, *each.shape[1:])]) for each in tensors], size

    def _prepare(self, given: Arguments, tensors: Sequence[torch.Tensor], size: int, *, training: bool) -> _Prepared:
        autocast = torch.is_autocast_enabled(self._device.type)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        key = (training, self.module.training, autocast, given.form, shapes)
        if key not in self._prepared:
            first = [tensor[:size] for tensor in tensors]
            recording = self.twin.record(self._layers, given.call, first, training=self.module.training)
            made = programs(recording, self._stage_of, self._count)
            schedule, own = self._scheduled(made, training=training)
            self._prepared[key] = _Prepared(schedule, own, made[-1].returned, recording)
        prepared = self._prepared[key]
        for stage, program in zip(self._own, prepared.programs, strict=True):
            stage.program = program
        return prepared

    def _scheduled(self, made: list[Program], *, training: bool) -> tuple[Any, list[Program]]:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        clock = self._clock

        class Timed(PipelineStage):
            def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
                with clock.busy(), _unwrapped():
                    return super().forward_one_chunk(*args, **kwargs)

            def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
                with clock.busy(), _unwrapped():
                    return super().backward_one_chunk(*args, **kwargs)

        numbers = [place * self._group.size() + self._group.rank() for place in range(len(self._own))]
        stages = [
            Timed(
                stage,
                number,
                self._count,
                self._device,
                input_args=_like(made[number].received, training=training),
                output_args=_like(made[number].returned, training=training),
                group=self._group,
            )
            for number, stage in zip(numbers, self._own, strict=True)
        ]
        loss = _no_loss if training else None
        many = len(stages) > 1
        kind: Any = ScheduleInterleaved1F1B if many else Schedule1F1B if self._schedule == "1f1b" else ScheduleGPipe
        schedule = kind(stages if many else stages[0], self._micro_batches, loss_fn=loss, scale_grads=False)
        return schedule, [made[number] for number in numbers]


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Context that raises what a layer or loss has raised, instead of torch's list of the stage's tensors."""
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None


@contextmanager
def _accumulating(stages: nn.Module, *, fresh: bool) -> Iterator[None]:
    """Context in which a schedule adds to gradients; on its first run, torch's clears those of sharded parameters."""
    held = [(p, p.grad) for p in stages.parameters() if p.grad is not None] if fresh else []
    for parameter, _ in held:
        parameter.grad = None
    yield
    for parameter, gradient in held:
        parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad


def _no_loss(*_: Any) -> torch.Tensor:
    raise AssertionError("a schedule has a loss while it runs")


def _named(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"input_{place}": tensor for place, tensor in enumerate(tensors)}


def _like(fakes: Sequence[torch.Tensor], *, training: bool) -> tuple[torch.Tensor, ...]:
    """Returns tensors of the same shapes and dtypes without values."""
    return tuple(
        torch.empty(fake.shape, dtype=fake.dtype, device="meta").requires_grad_(training and fake.is_floating_point())
        for fake in fakes
    )


def _nested(recording: Recording, outputs: Sequence[torch.Tensor]) -> Any:
    """Returns what the module returns, made of the tensors among its outputs."""
    left = iter(outputs)
    values = [next(left) if isinstance(value, torch.fx.Node) else value for value in recording.outputs]
    return pytree.tree_unflatten(values, recording.spec)


class _Clock:
    """Measures how long a rank computes while a schedule runs."""

    def __init__(self, *, active: bool) -> None:
        self._active, self._on, self._busy, self._whole = active, False, 0.0, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._on, started = True, time.perf_counter()
        yield
        self._on = False
        self._whole += time.perf_counter() - started

    @contextmanager
    def busy(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self._on:
            self._busy += time.perf_counter() - started

    def read(self) -> tuple[float, float]:
        busy, whole = self._busy, self._whole
        self._busy = self._whole = 0.0
        return (whole - busy, whole) if self._active else (0.0, 0.0)
