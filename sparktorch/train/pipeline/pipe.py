"""A module whose stages are on different ranks: torch's schedules pass micro-batches through them."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.devices import is_host
from sparktorch.errors import ModuleError
from sparktorch.train.numerics.determinism import untouched_generators
from sparktorch.train.pipeline.checks import check_rows
from sparktorch.train.pipeline.cut import Output, Stage
from sparktorch.train.sharding.arguments import Arguments

__all__ = ["MicroLoss", "Pipe", "as_bytes"]

_MOST_PREPARED = 8  # schedules that a rank keeps, for shapes that it has met

# Returns the loss of the output for the rows from the first to the second number.
MicroLoss = Callable[[Any, int, int], torch.Tensor]


@dataclass
class _Prepared:
    """Torch's schedule and stages for inputs of some shapes, what all stages return, and the output's nesting."""

    schedule: Any
    stages: list[Any]
    passed: list[list[torch.Tensor]]
    returned: Any
    used: bool = False


class Pipe(nn.Module):
    """A module divided into stages, one after another on the ranks of a group.

    All ranks of the group have the same rows. A forward pass without gradients returns the output in every rank; with
    gradients, `train_rows` runs forward and backward.
    """

    def __init__(
        self,
        module: nn.Module,
        own: Mapping[int, Stage],
        group: dist.ProcessGroup,
        device: torch.device,
        schedule: str,
        micro_batches: int,
        *,
        copies: bool,
    ) -> None:
        """Takes the module, this rank's stages by number, and how they run."""
        super().__init__()
        self.module, self.stages = module, nn.ModuleList(own.values())
        self._own, self._group, self._device, self._copies = own, group, device, copies
        self._schedule, self._micro_batches = schedule, micro_batches
        self._prepared: dict[Any, _Prepared] = {}
        self._loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
        self._busy, self._idle, self._whole = 0.0, 0.0, 0.0  # seconds of passes, between them, and of schedules

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of all rows."""
        given = Arguments.of(args, kwargs)
        inputs, size = self._padded(given)
        prepared = self._prepare(given, inputs, size, training=False)
        outputs = prepared.schedule.step(**inputs)
        for stage in prepared.stages:
            stage.clear_runtime_states()  # it keeps outputs
        found = []
        for place, one in enumerate(prepared.passed[-1]):
            every = one.new_empty(size * self._micro_batches, *one.shape[1:])
            value = None if outputs is None else outputs[place]
            found.append(self._told(value, every, self._group.size() - 1)[: given.rows])
        return _nested(prepared.returned, found)

    def train_rows(
        self, given: Arguments, loss: MicroLoss, scale: float, autocast: AbstractContextManager[Any]
    ) -> torch.Tensor:
        """Runs forward and backward on rows that all ranks of the group have; returns the sum of the losses.

        It is the same in all ranks, and without the factor `scale`. `loss` is called in the last stage.
        """
        inputs, size = self._padded(given)
        total = torch.zeros((), dtype=torch.float64, device=self._device)  # in all ranks, whatever the loss has
        for own in self._own.values():
            own.autocast = autocast
        prepared = self._prepare(given, inputs, size, training=True)

        def of_micro_batch(outputs: Any, target: torch.Tensor) -> torch.Tensor:
            nonlocal total
            first = int(target[0])
            kept = min(first + size, given.rows) - first
            if kept <= 0:  # nothing but padding
                return sum((output.sum() * 0 for output in outputs if output.requires_grad), torch.zeros_like(total))
            found = loss(_nested(prepared.returned, [output[:kept] for output in outputs]), first, first + kept)
            total = total + found.detach()
            return found * scale

        self._loss, self._busy, started = of_micro_batch, 0.0, time.perf_counter()
        with _accumulating(self.stages, fresh=not prepared.used):
            places = torch.arange(size * self._micro_batches)
            prepared.schedule.step(target=places, return_outputs=False, **inputs)
        seconds = time.perf_counter() - started
        self._whole += seconds
        self._idle += seconds - self._busy
        prepared.used, self._loss = True, None
        for stage in prepared.stages:
            stage.clear_runtime_states()
        for own in self._own.values():
            own.autocast = nullcontext()
        dist.all_reduce(total, group=self._group)
        return total

    def train(self, mode: bool = True) -> Pipe:
        """Sets the mode of parts that `stages` has made, and of the module, whose own `train` decides on its parts."""
        self.training = mode
        self.stages.train(mode)
        self.module.train(mode)
        return self

    def idle(self) -> tuple[float, float]:
        """Returns the seconds this rank was idle in schedules since the last call, and their seconds; zeros on GPUs."""
        found = (self._idle, self._whole) if is_host(self._device) else (0.0, 0.0)
        self._idle = self._whole = 0.0
        return found

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Context of a stage's pass; raises what a layer or loss has raised, instead of torch's list of tensors."""
        started = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise error.__cause__ or error from None
        self._busy += time.perf_counter() - started

    def _padded(self, given: Arguments) -> tuple[dict[str, torch.Tensor], int]:
        """Returns the tensors by name, the last row repeated, and the rows of a micro-batch: as many in all groups.

        Groups that have the same stages gather shards as often, and so meet new shapes at the same time.
        """
        rows, tensors = given.rows, given.tensors
        if self._copies:
            form = zlib.crc32(repr([(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]).encode())
            met = torch.tensor([rows, form, -form])
            dist.all_reduce(met, dist.ReduceOp.MAX)
            rows, highest, lowest = met.tolist()
            if highest != -lowest:
                raise ModuleError(
                    "ranks that have the same stages call the module with tensors of other shapes or dtypes",
                    hint="pad inputs to a fixed length, in preprocess",
                    param="strategyParams",
                )
        size = math.ceil(rows / self._micro_batches)
        missing = size * self._micro_batches - given.rows
        if missing:
            tensors = [torch.cat([each, each[-1:].expand(missing, *each.shape[1:])]) for each in tensors]
        return {f"input_{place}": tensor for place, tensor in enumerate(tensors)}, size

    def _prepare(self, given: Arguments, inputs: dict[str, torch.Tensor], size: int, *, training: bool) -> _Prepared:
        """Returns the schedule for some shapes, and sets the stages to the arguments."""
        for stage in self._own.values():
            stage.given = given
        mode = training, self.module.training, torch.is_autocast_enabled(self._device.type), given.form
        key = (*mode, *((tensor.shape, tensor.dtype) for tensor in inputs.values()))
        if key not in self._prepared:
            first = {name: tensor[:size].clone() for name, tensor in inputs.items()}  # a module may change its inputs
            passed, returned = self._tried(first, training=training)
            check_rows(passed[-1], size)
            schedule, stages = self._scheduled(passed, training=training)
            self._prepared[key] = _Prepared(schedule, stages, passed, returned)
            if len(self._prepared) > _MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]
        prepared = self._prepared[key]
        for number, stage in self._own.items():
            stage.expected = prepared.passed[number]
        return prepared

    def _tried(self, inputs: dict[str, torch.Tensor], *, training: bool) -> tuple[list[list[torch.Tensor]], Any]:
        """Passes a micro-batch through the stages, one after another, so that all ranks know what each returns.

        Returns:
            Without values, what each stage returns; and the output, with an `Output` for each tensor.
        """
        values: list[torch.Tensor] = []
        passed: list[list[torch.Tensor]] = []
        told: list[Any] = [None]
        with untouched_generators(self._device), torch.set_grad_enabled(training):
            for number in range(len(self._own) * self._group.size()):
                source, own = number % self._group.size(), self._own.get(number)
                found: Any = None
                if own is not None:
                    own.expected = None
                    found = own(*values, **inputs)
                    told = [([(tuple(v.shape), v.dtype, v.requires_grad) for v in found], own.returned)]
                dist.broadcast_object_list(told, group=self._group, group_src=source)
                metas = [torch.empty(s, dtype=d, device="meta", requires_grad=g) for s, d, g in told[0][0]]
                sent = [None] * len(metas) if found is None else found
                pairs = zip(sent, metas, strict=True)
                values = [self._told(value, meta, source).requires_grad_(meta.requires_grad) for value, meta in pairs]
                passed.append(metas)
        return passed, told[0][1]

    def _told(self, value: torch.Tensor | None, meta: torch.Tensor, source: int) -> torch.Tensor:
        """Returns a rank's tensor in all ranks."""
        every = torch.empty(meta.shape, dtype=meta.dtype, device=self._device) if value is None else value.detach()
        every = every.contiguous()
        dist.broadcast(as_bytes(every), group=self._group, group_src=source)
        return every

    def _scheduled(self, passed: list[list[torch.Tensor]], *, training: bool) -> tuple[Any, list[Any]]:
        """Returns torch's schedule, and the stages that it runs."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        passing = self._passing

        class Timed(PipelineStage):
            def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
                with passing():
                    return super().forward_one_chunk(*args, **kwargs)

            def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
                with passing():
                    return super().backward_one_chunk(*args, **kwargs)

        def loss_of(outputs: Any, target: torch.Tensor) -> torch.Tensor:
            assert self._loss is not None, "a schedule has a loss while it runs"
            return self._loss(outputs, target)

        stages = []
        for number, own in self._own.items():
            received, sent = tuple(passed[number - 1] if number else ()), tuple(passed[number])
            stages.append(Timed(own, number, len(passed), self._device, received, sent, group=self._group))
        many = len(stages) > 1
        single: Any = Schedule1F1B if self._schedule == "1f1b" else ScheduleGPipe
        kind: Any = ScheduleInterleaved1F1B if many else single
        loss = loss_of if training else None
        return kind(stages if many else stages[0], self._micro_batches, loss_fn=loss, scale_grads=False), stages


@contextmanager
def _accumulating(stages: nn.Module, *, fresh: bool) -> Iterator[None]:
    """Context in which a schedule adds to gradients; on its first run, torch's clears those of sharded parameters."""
    from torch.distributed.fsdp import FSDPModule

    for part in stages.modules() if fresh else ():
        if isinstance(part, FSDPModule):
            part.reshard()  # shards have the gradients, and `_tried` has gathered them
    held = [(p, p.grad) for p in stages.parameters() if p.grad is not None] if fresh else []
    for parameter, _ in held:
        parameter.grad = None
    yield
    for parameter, gradient in held:
        parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor's memory, for backends do not take every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _nested(returned: Any, outputs: Sequence[torch.Tensor]) -> Any:
    """Returns what the module returns, made of the tensors among its outputs."""
    return pytree.tree_map(lambda leaf: outputs[leaf.place] if isinstance(leaf, Output) else leaf, returned)
