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

_MOST_PREPARED = 8  # A rank keeps so many schedules, for shapes that it has met.

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
        stages: Mapping[int, Stage],
        group: dist.ProcessGroup,
        device: torch.device,
        schedule: str,
        micro_batches: int,
        *,
        copies: bool,
    ) -> None:
        """Takes the module, this rank's stages by number, and how they run."""
        super().__init__()
        self.module, self.stages = module, nn.ModuleList(stages.values())
        self._stages, self._group, self._device, self._copies = stages, group, device, copies
        self._schedule, self._micro_batches = schedule, micro_batches
        self._prepared: dict[Any, _Prepared] = {}
        self._loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
        # Seconds of passes, between them, and of whole schedules.
        self._busy, self._idle, self._whole = 0.0, 0.0, 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of all rows."""
        arguments = Arguments.of(args, kwargs)
        inputs, size = self._padded(arguments)
        prepared = self._prepare(arguments, inputs, size, training=False)
        outputs = prepared.schedule.step(**inputs)
        for stage in prepared.stages:
            stage.clear_runtime_states()  # They would keep the outputs.
        in_all_ranks = []
        for index, of_micro_batch in enumerate(prepared.passed[-1]):
            meta = of_micro_batch.new_empty(size * self._micro_batches, *of_micro_batch.shape[1:])
            output = None if outputs is None else outputs[index]
            in_all_ranks.append(self._broadcast(output, meta, self._group.size() - 1)[: arguments.rows])
        return _nested(prepared.returned, in_all_ranks)

    def train_rows(
        self, arguments: Arguments, loss: MicroLoss, scale: float, autocast: AbstractContextManager[Any]
    ) -> torch.Tensor:
        """Runs forward and backward on rows that all ranks of the group have; returns the sum of the losses.

        It is the same in all ranks, and without the factor `scale`. `loss` is called in the last stage.
        """
        inputs, size = self._padded(arguments)
        # It has this dtype in all ranks, whatever that of the loss is, which the last one computes.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for stage in self._stages.values():
            stage.autocast = autocast
        prepared = self._prepare(arguments, inputs, size, training=True)

        def of_micro_batch(outputs: Any, target: torch.Tensor) -> torch.Tensor:
            nonlocal total
            first = int(target[0])
            rows = min(first + size, arguments.rows) - first
            if rows <= 0:  # There is nothing but padding.
                return sum((output.sum() * 0 for output in outputs if output.requires_grad), torch.zeros_like(total))
            value = loss(_nested(prepared.returned, [output[:rows] for output in outputs]), first, first + rows)
            total = total + value.detach()
            return value * scale

        self._loss, self._busy, started = of_micro_batch, 0.0, time.perf_counter()
        with _accumulating(self.stages, fresh=not prepared.used):
            positions = torch.arange(size * self._micro_batches)
            prepared.schedule.step(target=positions, return_outputs=False, **inputs)
        seconds = time.perf_counter() - started
        self._whole += seconds
        self._idle += seconds - self._busy
        prepared.used, self._loss = True, None
        for of_torch in prepared.stages:
            of_torch.clear_runtime_states()
        for stage in self._stages.values():
            stage.autocast = nullcontext()
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
        seconds = (self._idle, self._whole) if is_host(self._device) else (0.0, 0.0)
        self._idle = self._whole = 0.0
        return seconds

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Context of a stage's pass; raises what a layer or loss has raised, instead of torch's list of tensors."""
        started = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise error.__cause__ or error from None
        self._busy += time.perf_counter() - started

    def _padded(self, arguments: Arguments) -> tuple[dict[str, torch.Tensor], int]:
        """Returns the tensors by name, the last row repeated, and the rows of a micro-batch: as many in all groups.

        Groups that have the same stages gather shards as often, and so meet new shapes at the same time.
        """
        rows, tensors = arguments.rows, arguments.tensors
        if self._copies:
            form = zlib.crc32(repr([(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]).encode())
            most = torch.tensor([rows, form, -form])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            rows, highest, lowest = most.tolist()
            if highest != -lowest:
                raise ModuleError(
                    "ranks that have the same stages call the module with tensors of other shapes or dtypes",
                    hint="pad inputs to a fixed length, in preprocess",
                    param="strategyParams",
                )
        size = math.ceil(rows / self._micro_batches)
        missing = size * self._micro_batches - arguments.rows
        if missing:
            tensors = [torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]) for tensor in tensors]
        return arguments.with_tensors(tensors).named, size

    def _prepare(
        self, arguments: Arguments, inputs: dict[str, torch.Tensor], size: int, *, training: bool
    ) -> _Prepared:
        """Returns the schedule for some shapes, and sets the stages to the arguments."""
        for stage in self._stages.values():
            stage.arguments = arguments
        mode = training, self.module.training, torch.is_autocast_enabled(self._device.type), arguments.form
        key = (*mode, *((tensor.shape, tensor.dtype) for tensor in inputs.values()))
        if key not in self._prepared:
            first = {name: tensor[:size].clone() for name, tensor in inputs.items()}  # It may change them in place.
            passed, returned = self._tried(first, training=training)
            check_rows(passed[-1], size)
            schedule, stages = self._scheduled(passed, training=training)
            self._prepared[key] = _Prepared(schedule, stages, passed, returned)
            if len(self._prepared) > _MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]
        prepared = self._prepared[key]
        for number, stage in self._stages.items():
            stage.expected = prepared.passed[number]
        return prepared

    def _tried(self, inputs: dict[str, torch.Tensor], *, training: bool) -> tuple[list[list[torch.Tensor]], Any]:
        """Passes a micro-batch through the stages, one after another, so that all ranks know what each returns.

        Returns:
            Without values, what each stage returns; and the output, with an `Output` for each tensor.
        """
        values: list[torch.Tensor] = []
        passed: list[list[torch.Tensor]] = []
        forms: list[Any] = [None]
        with untouched_generators(self._device), torch.set_grad_enabled(training):
            for number in range(len(self._stages) * self._group.size()):
                source, stage = number % self._group.size(), self._stages.get(number)
                outputs: Sequence[torch.Tensor | None] = ()
                if stage is not None:
                    stage.expected = None
                    outputs = returned = stage(*values, **inputs)
                    forms = [([(tuple(v.shape), v.dtype, v.requires_grad) for v in returned], stage.returned)]
                dist.broadcast_object_list(forms, group=self._group, group_src=source)
                metas = [torch.empty(s, dtype=d, device="meta", requires_grad=g) for s, d, g in forms[0][0]]
                values = []
                for output, meta in zip(outputs or [None] * len(metas), metas, strict=True):
                    values.append(self._broadcast(output, meta, source).requires_grad_(meta.requires_grad))
                passed.append(metas)
        return passed, forms[0][1]

    def _broadcast(self, value: torch.Tensor | None, meta: torch.Tensor, source: int) -> torch.Tensor:
        """Returns a rank's tensor in all ranks; `meta` has its shape and dtype."""
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self._device) if value is None else value.detach()
        tensor = tensor.contiguous()
        dist.broadcast(as_bytes(tensor), group=self._group, group_src=source)
        return tensor

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
        for number, stage in self._stages.items():
            received, sent = tuple(passed[number - 1] if number else ()), tuple(passed[number])
            stages.append(Timed(stage, number, len(passed), self._device, received, sent, group=self._group))
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
            part.reshard()  # Shards have the gradients, and `_tried` has gathered them.
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

    def tensor_of(leaf: Any) -> Any:
        return outputs[leaf.position] if isinstance(leaf, Output) else leaf

    return pytree.tree_map(tensor_of, returned)
