"""A module whose stages are on different ranks: torch's schedules pass micro-batches through them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.devices import is_host
from sparktorch.base.state_dict import WRAPPER
from sparktorch.errors import ModuleError
from sparktorch.train.dtensor import whole
from sparktorch.train.pipeline.arguments import Arguments
from sparktorch.train.pipeline.kept import attributes
from sparktorch.train.pipeline.programs import Program, Stage, programs
from sparktorch.train.pipeline.recording import Recording, Twin

__all__ = ["MicroLoss", "Pipe", "check_rows", "names_in_stages", "stages_of"]

_MOST_PREPARED = 16  # schedules that a rank keeps, for shapes that it has met

# Returns the loss of the output for the rows from the first to the second number.
MicroLoss = Callable[[Any, int, int], torch.Tensor]


@dataclass
class _Prepared:
    """What this rank runs for inputs of some shapes.

    Attributes:
        schedule: Torch's schedule.
        stages: Torch's stages, which it runs.
        programs: The program of each of this rank's stages.
        outputs: Shape and dtype of the outputs of a micro-batch, without values.
        recording: The forward pass.
        checksum: Of the recording.
        used: Whether the schedule has run.
    """

    schedule: Any
    stages: list[Any]
    programs: list[Program]
    outputs: list[torch.Tensor]
    recording: Recording
    checksum: int
    used: bool = False


class Pipe(nn.Module):
    """A module divided into stages, one after another on the ranks of a group.

    All ranks of the group have the same rows. A forward pass without gradients returns the output in every rank; with
    gradients, `train_rows` runs forward and backward.

    Attributes:
        module: The user's module, of which this rank has the parameters of its stages.
        stages: This rank's stages.
        twin: The module with all of its parameters, without values.
        most_rows: The most rows of a pass in training so far; passes of fewer are padded, so that schedules are reused.
        recorded: The checksum of the recording that ran last, which is to be the same in all ranks.
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
        self.most_rows = self.recorded = 0
        self._names = names_in_stages(twin.module, stage_of)
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
        for stage in prepared.stages:
            stage.clear_runtime_states()  # it keeps outputs
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
        self.most_rows = max(self.most_rows, rows)
        padded, size = self._padded(given.tensors, self.most_rows)
        with autocast:
            prepared = self._prepare(given, padded, size, training=True)
        total = torch.zeros((), dtype=torch.float64, device=self._device)  # in all ranks, whatever the loss has

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
        for stage in prepared.stages:
            stage.clear_runtime_states()
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
            tensor = (
                whole(own[self._names.get(name, name)].detach()) if here else None
            )  # a collective of the stage's ranks
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

    def shares(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of this rank's stages under their first names in the module, shards as `DTensor`s.

        The first rank of the group has those that are in no stage, too.
        """
        own, named = self.module.state_dict(keep_vars=True), self.twin.module.state_dict(keep_vars=True)
        first = {id(meta): name for name, meta in reversed(named.items())}
        here = [name for name in named if first[id(named[name])] == name and self._rank_of(name) == self._group.rank()]
        return {name: own[self._names.get(name, name)].detach() for name in here}

    @property
    def common_buffers(self) -> list[torch.Tensor]:
        """The buffers that are in no layer of a stage, which all ranks have."""
        named = self.module.named_buffers(remove_duplicate=False)
        return [buffer for name, buffer in named if name.replace(WRAPPER, "") not in self._names]

    @cached_property
    def own_names(self) -> Collection[str]:
        """Names of the tensors that this rank's stages alone have, as in a state dict."""
        found = self.module.state_dict()
        return {name for name in found if name in self._names and self._rank_of(name) == self._group.rank()}

    def _rank_of(self, name: str) -> int:
        """Returns the rank in the group that has a parameter or buffer; the first for buffers between layers."""
        return next(iter(stages_of(self._names.get(name, name), self._stage_of)), 0) % self._group.size()

    def train(self, mode: bool = True) -> Pipe:
        """Sets the mode of the module, whose own `train` decides on its parts, which are those of the stages."""
        self.training = mode
        self.module.train(mode)
        return self

    def idle(self) -> tuple[float, float]:
        """Returns the seconds this rank was idle in schedules since the last call, and their seconds; zeros on GPUs."""
        return self._clock.read()

    def _padded(self, tensors: Sequence[torch.Tensor], rows: int) -> tuple[list[torch.Tensor], int]:
        """Returns the tensors with as many rows as the micro-batches have, the last row again and again; and theirs."""
        size = math.ceil(rows / self._micro_batches)
        missing = size * self._micro_batches - len(tensors[0])
        if not missing:
            return list(tensors), size
        return [torch.cat([each, each[-1:].expand(missing, *each.shape[1:])]) for each in tensors], size

    def _prepare(self, given: Arguments, tensors: Sequence[torch.Tensor], size: int, *, training: bool) -> _Prepared:
        autocast = torch.is_autocast_enabled(self._device.type)
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        kept = frozenset(attributes(self.module, self._layers).items())
        key = (training, kept, autocast, given.form, shapes)
        if key not in self._prepared:
            first = [tensor[:size] for tensor in tensors]
            recording = self.twin.record(
                self._layers, given.call, first, training=self.module.training, attributes_of=self.module
            )
            made = programs(recording, self._stage_of, self._count)
            check_rows(made[-1].returned, size)
            schedule, stages, own = self._scheduled(made, training=training)
            self._prepared[key] = _Prepared(schedule, stages, own, made[-1].returned, recording, recording.checksum())
            if len(self._prepared) > _MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]
        prepared = self._prepared[key]
        self.recorded = prepared.checksum
        for stage, program in zip(self._own, prepared.programs, strict=True):
            stage.program = program
        return prepared

    def _scheduled(self, made: list[Program], *, training: bool) -> tuple[Any, list[Any], list[Program]]:
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
        return schedule, stages, [made[number] for number in numbers]


def check_rows(outputs: Sequence[torch.Tensor], rows: int) -> None:
    """Refuses outputs without a row for each row, which micro-batches cannot be put together of.

    Raises:
        ModuleError: An output is one.
    """
    for output in outputs:
        if output.shape[:1] != (rows,):
            raise ModuleError(
                f"the module returns a tensor of shape {tuple(output.shape)} for {rows} rows, and a pipeline computes "
                "on a micro-batch at a time",
                hint="return tensors with a row for each row, as models of transformers do without labels, and compute "
                "the loss in loss or trainingStep",
                param="module",
            )


def stages_of(name: str, stage_of: Mapping[str, int]) -> list[int]:
    """Returns the stage of a parameter or buffer, or of a layer that has it; nothing if it is in none."""
    parts = name.split(".")
    paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return [stage_of[path] for path in paths if path in stage_of][:1]


def names_in_stages(module: nn.Module, stage_of: Mapping[str, int]) -> dict[str, str]:
    """Returns the name under which a stage has the parameter or buffer of each name; tied ones have several."""
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    in_stages: dict[int, str] = {}
    for name, tensor in named.items():
        if stages_of(name, stage_of):
            in_stages.setdefault(id(tensor), name)
    return {name: in_stages[id(tensor)] for name, tensor in named.items() if id(tensor) in in_stages}


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


def _like(values: Sequence[torch.Tensor], *, training: bool) -> tuple[torch.Tensor, ...]:
    """Returns tensors of the same shapes and dtypes without values, which require gradients in training only."""
    return tuple(value.detach().requires_grad_(training and value.requires_grad) for value in values)


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
