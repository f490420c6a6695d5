"""Evaluates a module on the validation rows of all ranks, and its loss on a few rows before a training."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparktorch.distributed.process_group import max_over_ranks, sum_over_ranks
from sparktorch.errors import ConfigError
from sparktorch.train.numerics.determinism import untouched_generators
from sparktorch.train.recipe.loss import Means, TrainingStep, check_mean, mean_of
from sparktorch.train.recipe.metrics import Metrics
from sparktorch.train.recipe.task import align, autocast, correct, predicted, rows_of

if TYPE_CHECKING:
    from sparktorch.base.batch import Batch, RankDataset
    from sparktorch.base.config import TrainConfig
    from sparktorch.base.world import World
    from sparktorch.distributed.client import Client
    from sparktorch.train.loop.engine import Engine
    from sparktorch.train.recipe.recipe import Recipe

__all__ = ["Best", "Validation", "check_loss", "improvements", "rows_at_a_time", "validations_in"]

# By default, a forward pass has at most this number of rows: more rows are no faster.
_MOST_ROWS = 4096
# Batches are enlarged up to this number of rows, because the overhead of a forward pass dominates with fewer rows.
_FEW_ROWS = 64
# A confusion matrix with more classes would be too large to read.
_MOST_CLASSES = 100
# `check_loss` takes the largest of a rank's batches in these first steps, and at most these first rows of it, and
# compares their losses in groups.
_CHECKED_STEPS = 64
_CHECKED_ROWS = 64
_GROUP_ROWS = 8
# Attributes of these types may count the passes of a module.
_COUNTER_TYPES = (int, float, str, type(None))


class Validation:
    """Evaluates a module on the validation rows of all ranks; every rank calls it after the same step."""

    def __init__(
        self,
        shard: RankDataset,
        engine: Engine,
        recipe: Recipe,
        config: TrainConfig,
        world: World,
        reporter: Client,
        *,
        rows: int,
        classes: int,
    ) -> None:
        """Prepares the evaluation.

        `reporter` counts every batch as progress; `rows` is the largest number of validation rows in any rank, and
        `classes` is 0 if labels are not classes.
        """
        self._shard = shard
        self._engine = engine
        self._world = world
        self._task = config.task
        self._reporter = reporter
        self._config = config
        self._shows_output = config.task == "classification" or bool(recipe.metrics)
        # Whether to capture the output from the training step's call of the module, and so to save another call. With
        # collective forward passes, no output is captured: either all ranks call the module once more, or none does.
        has_collective_passes = engine.strategy_kind.divides_parameters
        is_compiled = config.compile or isinstance(engine.unwrapped, torch.jit.ScriptModule)
        self._captures = not (has_collective_passes or is_compiled)
        self._metrics = Metrics(recipe.metrics, config.task, world.device)
        # With collective forward passes, all ranks need the same number of batches; 0 means as many as the rank has.
        self._batches = math.ceil(rows / self._size) if has_collective_passes else 0
        self._confusion_classes = classes if classes <= _MOST_CLASSES else 0

    @property
    def _size(self) -> int:
        """The most rows in a forward pass; "auto" may have found a smaller size since the last validation."""
        return rows_at_a_time(self._config, self._world.world_size, self._engine.micro_batches.size)

    @torch.no_grad()
    def run(self, module: nn.Module) -> tuple[dict[str, float], torch.Tensor | None]:
        """Evaluates the module; the ranks exchange sums and metric states, not means.

        Returns the metrics, and the confusion matrix, int64 of shape `(classes, classes)`; `None` without classes, or
        with too many.
        """
        hooks = self._engine.hooks
        step = self._engine.training_step
        means = self._engine.new_means("val_")
        hooks.begin_validation()
        module.eval()
        # The sums stay on the device, because reading one in each batch would wait for the device's work. They are:
        # 0: losses; 1: weights of the losses; 2: weights of the rows; 3: weights of the rows that are classified right;
        # 4: number of losses.
        totals = torch.zeros(5, dtype=torch.float64, device=self._world.device)
        counts = torch.zeros(self._confusion_classes**2, dtype=torch.float64, device=self._world.device)
        with closing(self._outputs(module, means)) as outputs:
            for batch, output, label, loss in outputs:
                weight = torch.ones(batch.rows, device=self._world.device) if batch.weight is None else batch.weight
                if loss is not None:
                    totals[0] += loss
                    totals[1] += weight.sum() if batch.loss_weight is None else batch.loss_weight.sum()
                    totals[4] += 1
                totals[2] += weight.sum()
                if self._task == "classification" and label is not None:
                    totals[3] += (correct(output, label) * weight).sum()
                    if self._confusion_classes:
                        cells = label.long() * self._confusion_classes + predicted(output, label)
                        counts.index_add_(0, cells, counts.new_ones(()).expand_as(cells))
                if self._shows_output:
                    self._metrics.update(output, label)
        summed = sum_over_ranks(torch.cat([totals, counts]), self._world)
        loss_sum, loss_weight_sum, weight_sum, correct_weight, losses = summed[:5].tolist()
        hooks.end_validation_rows()
        measured = {"val_loss": mean_of(loss_sum, loss_weight_sum)} if losses else {}
        if self._task == "classification":
            measured["val_accuracy"] = mean_of(correct_weight, weight_sum)
        if step is None:
            metrics = measured
        elif step.logs_validation:  # A value that the module logs replaces the one that is measured under its name.
            metrics = measured | means.over_ranks(self._world)
        else:
            metrics = means.over_ranks(self._world) | measured
        metrics |= {f"val_{name}": value for name, value in self._metrics.compute().items()}
        hooks.end_validation(metrics)
        if not self._confusion_classes:
            return metrics, None
        return metrics, summed[5:].long().view(self._confusion_classes, self._confusion_classes)

    def _outputs(
        self, module: nn.Module, means: Means
    ) -> Generator[tuple[Batch, Any, torch.Tensor | None, torch.Tensor | None]]:
        """Yields each batch of this rank with its output and label as from `align`, and its loss sum if there is one.

        A training step calls the module itself. The output is captured from this call, and is `None` if nothing needs
        it.
        """
        engine = self._engine
        with closing(self._shard.validation(self._size, batches=self._batches)) as batches:
            for part in self._reporter.moving(batches):
                loss: torch.Tensor | None = None
                with engine.strategy.shared_rows(part) as batch:
                    if engine.training_step is None:
                        output = engine.forward(module, batch)
                    else:
                        with _calls(module, capture=self._shows_output and self._captures) as calls:
                            loss, sums = engine.evaluate(module, batch)
                        means.add(sums)
                        output = self._output(module, batch, calls)
                # Without rows, the rank only takes part in collective passes. If another rank reports these rows, this
                # rank must not count them again.
                if not batch.rows or not engine.strategy.reports_rows:
                    continue
                label = batch.label
                if output is not None:
                    output, label = align(self._task, output, label)
                if engine.loss is not None:
                    loss = engine.loss(output, label, batch.loss_weight)
                yield batch, output, label, loss

    def _output(self, module: nn.Module, batch: Batch, calls: list[tuple[Any, ...]]) -> Any:
        """Returns the module's output for a batch of a training step; `None` if nothing needs it."""
        if not self._shows_output:
            return None
        # The captured output can be used if the step has called the module once, with the batch's inputs, and nothing
        # has changed the output in place since.
        if len(calls) == 1:
            versions, arguments, keywords, output = calls[0]
            same_inputs = len(arguments) == len(batch.inputs) and all(map(operator.is_, arguments, batch.inputs))
            is_unchanged = versions is not None and versions == _versions(output)
            if same_inputs and not keywords and is_unchanged:
                return self._engine.widen(output)
        return self._engine.forward(module, batch)


@contextmanager
def _calls(module: nn.Module, *, capture: bool) -> Iterator[list[tuple[Any, ...]]]:
    """Context that records each call of the module: versions of its output, arguments, keyword arguments, output."""
    calls: list[tuple[Any, ...]] = []
    if not capture:
        yield calls
        return

    def record(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        calls.append((_versions(output), arguments, keywords, output))

    handle = module.register_forward_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def _versions(output: Any) -> list[int] | None:
    """Returns the in-place version counters of an output's tensors; `None` if the output cannot be reused."""
    parts: Iterable[Any] = [output]
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, tuple | list):
        parts = output
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return None
    # Tensors of inference mode have no version, and an output that requires a gradient would keep its graph alive.
    if any(part.is_inference() or part.requires_grad for part in parts):
        return None
    return [part._version for part in parts]


def rows_at_a_time(config: TrainConfig, ranks: int, micro_batch_size: int | None) -> int:
    """Returns the number of validation rows in a forward pass of a rank, the same in every rank.

    Training keeps the activations of all layers, and validation those of one layer. So rows that fit into memory in
    training fit in validation, too. Small batches without micro-batches are enlarged up to eight times, to 64 rows at
    most. `micro_batch_size` is `None` if there is no such limit.
    """
    if config.validation_batch_size is not None:
        return config.validation_batch_size
    rows_of_rank = math.ceil(config.batch_size / ranks)
    rows_of_pass = math.ceil(rows_of_rank / config.accumulation_steps)
    if micro_batch_size is not None:
        rows_of_pass = min(micro_batch_size, rows_of_rank)
    rows_of_pass = min(rows_of_pass, _MOST_ROWS)
    is_split = micro_batch_size is not None or config.accumulation_steps > 1
    return rows_of_pass if is_split else max(rows_of_pass, min(8 * rows_of_pass, _FEW_ROWS))


class Best:
    """The weights of the best validation, and the number of validations since then.

    Attributes:
        state: These weights; `None` before the first validation. On ranks other than 0 it may be an empty dict.
    """

    def __init__(self, config: TrainConfig) -> None:
        """Takes the configuration, which says which validation is the best; without patience, no weights are kept."""
        self._config = config
        # The badness of the best validation, as `TrainConfig.judged` returns it: a loss, or a metric with its sign
        # changed. Smaller is better.
        self._loss = math.inf
        self._waited = 0
        self.state: dict[str, torch.Tensor] | None = None

    @property
    def out_of_patience(self) -> bool:
        """Whether training should end."""
        return self._config.patience is not None and self._waited >= self._config.patience

    def offer(self, metrics: Mapping[str, Any], state: Callable[[], dict[str, torch.Tensor]]) -> bool:
        """Returns whether training would return the current weights now: the best ones, or without patience the last.

        `state` returns a copy of the weights; it is called in all ranks or in none. A `ConfigError` says that the
        metrics lack the one that decides which validation is the best.
        """
        loss = self._config.judged(metrics)
        name = self._config.needs_metric
        if loss is None and name is not None:
            raise ConfigError(
                f"earlyStoppingMetric is {name!r}, which the validation does not have",
                hint=f"set one that it has: {', '.join(sorted(metrics))}",
                param="earlyStoppingMetric",
                code="ST-METRIC",
            )
        if self._config.patience is None:
            return True
        if loss is None or not loss < self._loss - self._config.best_delta:
            self._waited += 1
            return False
        self._loss = loss
        self._waited = 0
        self.state = state()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters, without the weights, for `load_state_dict`."""
        return {"loss": self._loss, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any], weights: dict[str, torch.Tensor]) -> None:
        """Restores the counters, and the best weights if there was a validation."""
        self._loss = state["loss"]
        self._waited = state["waited"]
        self.state = weights if self._loss < math.inf else None


def validations_in(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the validations in an epoch's record in order, from the one before the first step on.

    An epoch without validation yields its record, which lacks the metrics of a validation.
    """
    if "untrained" in record:
        yield record["untrained"]
    yield from record.get("validations") or [record]


def improvements(
    history: Iterable[Mapping[str, Any]], config: TrainConfig
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yields each validation that was the best so far, with its epoch's record; without patience, all validations."""
    best = Best(config)
    for record in history:
        for validation in validations_in(record):
            if config.judged(validation) is not None and best.offer(validation, dict):
                yield validation, record


@torch.no_grad()
def check_loss(engine: Engine, config: TrainConfig, world: World, dataset: RankDataset) -> None:
    """Checks on a few rows that a loss that is one number is the mean of the rows' losses; every rank calls it.

    The module is in evaluation mode. A loss that draws random numbers is not compared.
    """
    step = engine.training_step
    loss = engine.loss
    if loss is not None and loss.rowwise:
        return
    # The device has room for the rows of a micro-batch. With "auto", nobody knows yet how many rows that is.
    micro_batch_rows = config.micro_batch_size or config.batch_size // (world.world_size * config.accumulation_steps)
    size = 2 if micro_batch_rows == "auto" else min(max(2, micro_batch_rows), _GROUP_ROWS)
    subject: dict[str, Any] = {}
    if step is not None:
        subject = {"what": step.what, "param": step.param, "rowwise": step.rowwise}
    elif loss is not None:
        subject = {"what": f"loss {loss.name}", "param": "loss"}
    is_rough = step is not None and config.precision in ("bf16", "fp16")
    largest_step = int(dataset.step_rows(0)[:_CHECKED_STEPS].argmax())
    with closing(dataset.epoch(0, first=largest_step)) as batches:
        batch = next(batches).complete()
    eager = torch.compiler.set_stance("force_eager") if config.compile else nullcontext()
    with (
        untouched_generators(torch.device(world.device)),
        engine.hooks.rehearsal(),
        engine.strategy.evaluating(engine.module) as module,
        eager,
        _restoring_counters(module, step),
    ):
        engine.module.eval()
        group = 0
        groups = 1
        while group < groups:
            first = group * size % batch.rows  # A rank with fewer rows than others begins with its first rows again.
            with engine.strategy.shared_rows(batch.slice(first, min(first + size, batch.rows))) as rows:
                losses = _losses(engine, config, module, rows)
                loss_of_all = next(losses)
                if group == 0:
                    # Only a loss that is one number is compared. A pass may be a collective: every rank takes as many
                    # passes as the rank with the most rows.
                    is_number = isinstance(loss_of_all, torch.Tensor) and loss_of_all.dim() == 0
                    count = math.ceil(min(batch.rows, _CHECKED_ROWS) / size) if is_number else 0
                    groups = int(max_over_ranks(torch.tensor(count), world))
                    if groups == 0:
                        break
                compared = [loss_of_all, *losses]
            half = rows.rows // 2
            if half:
                check_mean(compared, (half, rows.rows - half), **subject, rough=is_rough)
            group += 1
    engine.training_mode()


@contextmanager
def _restoring_counters(module: nn.Module, step: TrainingStep | None) -> Iterator[None]:
    """Context of passes that must leave no trace: neither in buffers, nor in attributes that may count the passes."""
    buffers_before = [buffer.clone() for buffer in module.buffers()]
    objects: list[Any] = [*module.modules()]
    if step is not None:
        objects.append(step)
    attributes = [vars(owner) for owner in objects if hasattr(owner, "__dict__")]
    counters_before = [_counters_in(values) for values in attributes]
    yield
    for buffer, before in zip(module.buffers(), buffers_before, strict=True):
        buffer.copy_(before)
    for values, counters in zip(attributes, counters_before, strict=True):
        values.update(counters)


def _counters_in(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of an object that may count its calls."""
    return {name: value for name, value in attributes.items() if isinstance(value, _COUNTER_TYPES)}


def _losses(engine: Engine, config: TrainConfig, module: nn.Module, batch: Batch) -> Iterator[Any]:
    """Yields the losses of all rows, of all rows again, of the first half of the rows, and of the second half.

    If they differ the second time, the loss draws random numbers. A loss is computed on one output of the module; a
    training step calls the module itself.
    """
    step = engine.training_step
    half = batch.rows // 2
    spans = [(0, batch.rows), (0, batch.rows), (0, half or 1), (half, batch.rows)]
    if engine.loss is not None:
        output, label = align(config.task, engine.forward(module, batch), batch.label)
        for start, end in spans:
            yield engine.loss.per_row(rows_of(output, start, end), None if label is None else label[start:end])
        return
    assert step is not None
    for start, end in spans:
        with autocast(batch.inputs[0].device, config.precision):
            loss, _ = step.per_row(engine.strategy.shown(module), batch.slice(start, end))
        yield loss
