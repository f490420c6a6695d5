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
from sparktorch.train.recipe.loss import Means, check_mean, mean_of
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

_MOST_ROWS = 4096  # per forward pass by default: more rows are no faster
_FEW_ROWS = 64  # with fewer rows, the overhead of a forward pass dominates
_MOST_CLASSES = 100  # of a confusion matrix
_ROWS, _TOGETHER = 64, 8  # of a rank, and of a forward pass
_NUMBERS = (int, float, str, type(None))  # that a module counts in its passes
_STEPS = 64  # in which a rank looks for most rows


class Validation:
    """Evaluates a module on the validation rows of all ranks; every rank calls it at the same place."""

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

        `reporter` counts every batch as progress; `rows` are the most validation rows of any rank, and `classes` 0 when
        labels are not classes.
        """
        self._shard, self._engine, self._world, self._task = shard, engine, world, config.task
        self._reporter = reporter
        self._config = config
        self._shows_output = config.task == "classification" or bool(recipe.metrics)
        # Whether to capture the output from the training step's own call of the module. Not with collective forwards:
        # either all ranks call the module once more, or none does.
        self._listens = not (
            config.compile or engine.kind.divides_parameters or isinstance(engine.unwrapped, torch.jit.ScriptModule)
        )
        self._metrics = Metrics(recipe.metrics, config.task, world.device)
        # With collective forwards, all ranks need the same number of batches.
        self._batches = math.ceil(rows / self._size) if engine.kind.divides_parameters else 0
        self._shown = classes if classes <= _MOST_CLASSES else 0

    @property
    def _size(self) -> int:
        """Most rows of a forward pass; "auto" may have found a smaller size since the last validation."""
        return rows_at_a_time(self._config, self._world.world_size, self._engine.split.size)

    @torch.no_grad()
    def run(self, module: nn.Module) -> tuple[dict[str, float], torch.Tensor | None]:
        """Evaluates the module; the ranks exchange sums and metric states, not means.

        Returns the metrics, and the confusion matrix, int64 of shape `(classes, classes)`; `None` without classes, or
        with too many.
        """
        hooks = self._engine.hooks
        means = self._engine.new_means("val_")
        hooks.begin_validation()
        module.eval()
        # Sums of losses and weights stay on the device: reading one in each batch would wait for the device's work.
        totals = torch.zeros(5, dtype=torch.float64, device=self._world.device)
        counts = torch.zeros(self._shown**2, dtype=torch.float64, device=self._world.device)
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
                    if self._shown:
                        cells = label.long() * self._shown + predicted(output, label)
                        counts.index_add_(0, cells, counts.new_ones(()).expand_as(cells))
                if self._shows_output:
                    self._metrics.update(output, label)
        summed = sum_over_ranks(torch.cat([totals, counts]), self._world)
        loss_sum, loss_weight_sum, weight_sum, right, losses = summed[:5].tolist()
        hooks.end_validation_rows()
        found = {}
        if self._engine.training_step is not None:
            found = means.over_ranks(self._world)
        step = self._engine.training_step
        measured = {"val_loss": mean_of(loss_sum, loss_weight_sum)} if losses else {}
        if self._task == "classification":
            measured["val_accuracy"] = mean_of(right, weight_sum)
        found = measured | found if step is not None and step.logs_validation else found | measured
        found |= {f"val_{name}": value for name, value in self._metrics.compute().items()}
        hooks.end_validation(found)
        return found, summed[5:].long().view(self._shown, self._shown) if self._shown else None

    def _outputs(
        self, module: nn.Module, means: Means
    ) -> Generator[tuple[Batch, Any, torch.Tensor | None, torch.Tensor | None]]:
        """Yields each batch of this rank with output and label as from `align`, and its loss sum if there is one.

        A training step calls the module itself. The output is captured from that call, or omitted if nothing needs it.
        """
        engine = self._engine
        with closing(self._shard.validation(self._size, batches=self._batches)) as batches:
            for held in self._reporter.moving(batches):
                batch = engine.strategy.together(held)
                loss: torch.Tensor | None = None
                if engine.training_step is None:
                    output = engine.forward(module, batch)
                else:
                    with _calls(module, listen=self._shows_output and self._listens) as calls:
                        loss, sums = engine.evaluated(module, batch)
                    means.add(sums)
                    output = self._output(module, batch, calls)
                if not batch.rows:
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
        if len(calls) == 1:
            versions, arguments, named, output = calls[0]
            same = len(arguments) == len(batch.inputs) and all(map(operator.is_, arguments, batch.inputs))
            if same and not named and versions is not None and versions == _versions(output):
                return self._engine.widened(output)
        return self._engine.forward(module, batch)


@contextmanager
def _calls(module: nn.Module, *, listen: bool) -> Iterator[list[tuple[Any, ...]]]:
    """Context that records each call of the module: output versions, positional and keyword arguments, output."""
    found: list[tuple[Any, ...]] = []
    if not listen:
        yield found
        return
    handle = module.register_forward_hook(lambda _, *call: found.append((_versions(call[-1]), *call)), with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


def _versions(output: Any) -> list[int] | None:
    """Returns the in-place version counters of an output's tensors; `None` if the output cannot be reused."""
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return None
    if any(part.is_inference() or part.requires_grad for part in parts):  # the latter keeps its graph alive
        return None
    return [part._version for part in parts]


def rows_at_a_time(config: TrainConfig, ranks: int, micro_batch_size: int | None) -> int:
    """Returns the number of validation rows in a forward pass of a rank, the same in every rank.

    Validation keeps the activations of one layer, training those of all layers. Rows that fit in training therefore fit
    in validation. Small batches without micro-batches are enlarged up to eight times, to 64 rows at most.
    `micro_batch_size` is `None` if it is not limited.
    """
    if config.validation_batch_size is not None:
        return config.validation_batch_size
    share = -(-config.batch_size // ranks)
    trained = min(micro_batch_size or -(-share // config.accumulation_steps), share, _MOST_ROWS)
    cut = micro_batch_size is not None or config.accumulation_steps > 1
    return trained if cut else max(trained, min(8 * trained, _FEW_ROWS))


class Best:
    """The weights of the best validation, and the number of validations since then.

    `state` is these weights, `None` before the first validation; on ranks other than 0 it may be an empty dict.
    """

    def __init__(self, config: TrainConfig) -> None:
        """Takes what says which validation is the best; without patience, no weights are kept."""
        self._config = config
        self._loss = math.inf  # `TrainConfig.judged` of the best
        self._waited = 0
        self.state: dict[str, torch.Tensor] | None = None

    @property
    def out_of_patience(self) -> bool:
        """Whether training should end."""
        return self._config.patience is not None and self._waited >= self._config.patience

    def offer(self, metrics: Mapping[str, Any], state: Callable[[], dict[str, torch.Tensor]]) -> bool:
        """Returns whether training would return the current weights now: the best, or without patience the last.

        `state` returns a copy of the weights; it is called in all ranks or in none. Refuses metrics without the one
        that says which is the best.
        """
        loss = self._config.judged(metrics)
        if loss is None and (name := self._config.needs_metric) is not None:
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
        self._loss, self._waited = loss, 0
        self.state = state()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters, without the weights, for `load_state_dict`."""
        return {"loss": self._loss, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any], weights: dict[str, torch.Tensor]) -> None:
        """Restores the counters, and the best weights if there was a validation."""
        self._loss, self._waited = state["loss"], state["waited"]
        self.state = weights if self._loss < math.inf else None


def validations_in(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the validations of an epoch in order, that before the first step among them; one may lack metrics."""
    if "untrained" in record:
        yield record["untrained"]
    yield from record.get("validations") or [record]


def improvements(
    history: Iterable[Mapping[str, Any]], config: TrainConfig
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yields the validations that were the best so far (all without patience), each with its epoch's record."""
    best = Best(config)
    for record in history:
        for found in validations_in(record):
            if config.judged(found) is not None and best.offer(found, dict):
                yield found, record


@torch.no_grad()
def check_loss(engine: Engine, config: TrainConfig, world: World, dataset: RankDataset) -> None:
    """Checks on a few rows that a loss which is one number is the mean of their losses; every rank calls it.

    The module is in evaluation mode. A loss that draws random numbers is not compared.
    """
    step, loss = engine.training_step, engine.loss
    if loss is not None and loss.rowwise:
        return
    given = config.micro_batch_size or config.batch_size // (world.world_size * config.accumulation_steps)
    size = 2 if given == "auto" else min(max(2, given), _TOGETHER)  # for which there is memory
    named = {"what": f"loss {loss.name}", "param": "loss"} if loss is not None else {}
    if step is not None:
        named = {"what": step.what, "param": step.param, "rowwise": step.rowwise}
    rough = step is not None and config.precision in ("bf16", "fp16")
    most = int(dataset.step_rows(0)[:_STEPS].argmax())
    with closing(dataset.epoch(0, first=most)) as batches:
        batch = next(batches).complete()
    groups, group = 1, 0
    eager = torch.compiler.set_stance("force_eager") if config.compile else nullcontext()
    evaluating = engine.strategy.evaluating(engine.module)
    with untouched_generators(torch.device(world.device)), engine.hooks.rehearsal(), evaluating as module, eager:
        buffers = [buffer.clone() for buffer in module.buffers()]
        stateful = [vars(each) for each in (*module.modules(), *([step] if step else [])) if hasattr(each, "__dict__")]
        numbers = [{name: value for name, value in of.items() if isinstance(value, _NUMBERS)} for of in stateful]
        engine.module.eval()
        while group < groups:
            first = group * size % batch.rows
            rows = batch.slice(first, min(first + size, batch.rows))
            losses = _losses(engine, config, module, rows)
            whole = next(losses)
            if group == 0:  # passes may be collectives, of which every rank takes as many
                scalar = isinstance(whole, torch.Tensor) and not whole.dim()
                groups = int(max_over_ranks(torch.tensor(-(-min(batch.rows, _ROWS) // size) * scalar), world))
            found = [whole, *losses] if groups else []
            if found and rows.rows > 1:
                check_mean(found, (rows.rows // 2, rows.rows - rows.rows // 2), **named, rough=rough)
            group += 1
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        for of, counted in zip(stateful, numbers, strict=True):
            of.update(counted)
    engine.training_mode()


def _losses(engine: Engine, config: TrainConfig, module: nn.Module, batch: Batch) -> Iterator[Any]:
    """Yields what the user's code computes for rows, twice, and for their halves; a loss on the same output."""
    strategy, step, half = engine.strategy, engine.training_step, batch.rows // 2
    spans = [(0, batch.rows), (0, batch.rows), (0, half or 1), (half, batch.rows)]
    if engine.loss is not None:
        output, label = align(config.task, engine.forward(module, strategy.together(batch)), batch.label)
        for start, end in spans:
            yield engine.loss.per_row(rows_of(output, start, end), None if label is None else label[start:end])
        return
    assert step is not None
    for start, end in spans:
        with autocast(batch.inputs[0].device, config.precision):
            loss, _ = step.per_row(strategy.shown(module), strategy.together(batch.slice(start, end)))
        yield loss
