"""A LightningModule in training: its steps, what it logs, and its hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from sparktorch.adapters.lightning.optimizers import Configured, LightningSchedule, configured
from sparktorch.adapters.lightning.recognise import overrides, parts
from sparktorch.adapters.lightning.state import ModuleMetrics, Saved, TrainerView, unchanged
from sparktorch.adapters.lightning.step import (
    Call,
    LightningStep,
    Logs,
    arguments_of,
    called,
    check_logged,
    loss_of,
    number_of,
)
from sparktorch.base.batch import Batch
from sparktorch.base.world import World
from sparktorch.errors import ModuleError, nearest, refusing
from sparktorch.train.recipe.loss import TrainingStep
from sparktorch.train.recipe.metrics import quiet
from sparktorch.train.recipe.module_hooks import ModuleHooks, Within, call_plainly

__all__ = ["LightningTraining", "training_of"]


def training_of(module: nn.Module) -> LightningTraining:
    """Returns the training that a module is attached to."""
    return vars(module)["log"].__self__  # type: ignore[no-any-return]


class LightningTraining(ModuleHooks):
    """One rank's training of a LightningModule, which sees it as `self.trainer`, `self.log` and `self.optimizers`."""

    def __init__(
        self, module: nn.Module, world: World, trainer: TrainerView, *, validates: bool, needs_metric: str | None
    ) -> None:
        """Attaches the training to a module that no strategy has wrapped, and to the LightningModules in it."""
        self._module: Any = module
        self.sees_gradients = overrides(module, "on_before_optimizer_step")
        self.name, self._world = type(module).__qualname__, world
        self._validates, self._needs_metric = validates, needs_metric
        self.trainer, self._parts = trainer, parts(module)
        for part in self._parts:
            vars(part).update(_trainer=trainer, log=self.log, optimizers=self._optimizers)
        self._metrics = ModuleMetrics(module)
        self._aside: dict[str, Any] = {}  # In a validation, it has the states of the training's metrics.
        self._logs = self._training_logs = self._early = Logs(self._metrics.compute)
        self._muted = False  # Whether logged values are dropped.
        self._within_step = False
        self._rows = 1  # The rows of the batch whose values are logged.
        self._step_rows = 0  # The rows of the step so far.
        self._rehearsing = False
        self._batch_index = self._validation_index = 0
        # The output, batch and number of the last batch, which `on_train_batch_end` gets.
        self._last: tuple[dict[str, Any], Batch, int] | None = None
        self._began = False
        self._evaluating: list[nn.Module] = []
        self._saved = Saved(module, trainer)

    def __deepcopy__(self, memo: dict[int, Any]) -> LightningTraining:
        return self  # A copy of the module belongs to the same training.

    @property
    def stop_requested(self) -> bool:  # type: ignore[override]
        """Whether `self.trainer.should_stop` is set."""
        return self.trainer.should_stop

    @cached_property
    def configured(self) -> Configured:
        """The module's optimizer and schedulers."""
        returned = configured(self._module)
        self.trainer.optimizers, self.trainer.lr_scheduler_configs = [returned.optimizer], list(returned.schedulers)
        return returned

    def training_step(self, within: Within) -> TrainingStep:
        """Returns the step that calls the module's `training_step`, and its `validation_step`."""
        return LightningStep(self, within)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LightningSchedule:
        """Returns the schedule of the module's schedulers."""
        from_module = self.configured  # When it is made, it sets the trainer's optimizers, too.
        self.trainer.optimizers = [optimizer]
        return LightningSchedule(from_module, optimizer, self.trainer)

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Returns the optimizer: `self.optimizers()` of the module."""
        return self.trainer.optimizers[0]

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Logs a value: `self.log` of the module, with the same arguments. Values are always those over all ranks.

        Raises:
            ModuleError: The name is taken by the record of the epoch, or the value is no number and no metric.
        """
        where = f"self.log({name!r}, ...) of {self.name}"
        reduce = check_logged(name, reduce_fx, where)
        on_step = self._within_step if on_step is None else on_step
        on_epoch = not self._within_step if on_epoch is None else on_epoch
        if not (on_step or on_epoch):
            raise ModuleError(f"{where} with on_step=False and on_epoch=False logs nothing", hint="set one of them")
        path, number = self._metrics.path_of(value), None
        if path:
            value = getattr(value, "_forward_cache", None)  # There is none after `update`.
        if not path or value is not None:
            number = number_of(value, where).detach().reshape(()).to(self._world.device)
        if self._muted or (rank_zero_only and not self._world.is_main):
            number = None
        if path or number is not None:
            rows, step = self._rows if batch_size is None else batch_size, self.trainer.global_step
            how = {"on_step": on_step, "on_epoch": on_epoch, "step": step, "metric": path}
            self._logs.log(name, number, rows, reduce=reduce, **how)

    def new_logs(self, prefix: str) -> Logs:
        """Returns an empty collection, into which values are logged from now on."""
        self._logs = logs = Logs(self._metrics.compute)
        if prefix == "train_":
            self._training_logs = logs
        return logs

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Context for passes that do not count: no hooks, nothing is logged, and the module counts nothing."""
        with unchanged([*self._parts, *self._metrics.collections]):
            self._rehearsing = True
            try:
                yield
            finally:
                self._rehearsing = False

    def train(self, call: Call, batch: Batch) -> torch.Tensor:
        """Calls the module's `training_step`, within its forward pass, and the hooks around it; returns its loss."""
        self._end_batch()
        module, index, arguments = self._module, self._batch_index, arguments_of(batch)
        step = partial(called, module.training_step, arguments, index)
        with self._logging(batch):
            if self._rehearsing:
                return loss_of(call(step), self.name)
            if module.on_train_batch_start(arguments, index) == -1:
                what = f"on_train_batch_start of {self.name} returned -1, which would end the epoch in this rank only"
                hint = "set self.trainer.should_stop = True, which ends the training after the epoch"
                raise ModuleError(what, hint=hint, param="module")
            output = call(step)
            loss = loss_of(output, self.name)
            module.on_before_backward(loss)
        more = {key: value for key, value in output.items() if key != "loss"} if isinstance(output, Mapping) else {}
        self._last = {"loss": loss.detach(), **more}, batch, index
        self._batch_index += 1
        self._step_rows += batch.rows
        return loss

    def validate(self, call: Call, batch: Batch) -> torch.Tensor | None:
        """Calls the module's `validation_step`, and the hooks around it; returns its loss if it returned one."""
        module, index, arguments = self._module, self._validation_index, arguments_of(batch)
        with self._logging(batch, within_step=False):
            module.on_validation_batch_start(arguments, index)
            output = call(partial(called, module.validation_step, arguments, index))
            module.on_validation_batch_end(output, arguments, index)
        self._validation_index += 1
        if isinstance(output, Mapping):
            output = output.get("loss")
        elif isinstance(output, torch.Tensor) and output.dim():
            return None  # The module has returned outputs for a hook.
        return output if isinstance(output, torch.Tensor) and output.is_floating_point() else None

    def begin_fit(self, epoch: int, step: int) -> None:
        """Calls `on_fit_start`, `on_train_start` and the first `on_train_epoch_start`."""
        self.trainer.current_epoch, self.trainer.global_step = epoch, step
        device = torch.device(self._world.device)
        self._metrics.to(device)
        for part in parts(self._module):
            vars(part)["_device"] = device  # Strategies that shard a module do not move it as a whole.
        self._logs = self._early
        for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
            self._hook(hook)
        self._logs = self._training_logs
        self._note_modes()

    def begin_epoch(self, epoch: int, *, fresh: bool) -> None:
        """Calls `on_train_epoch_start`, unless `begin_fit` has called it for this epoch."""
        self.trainer.current_epoch = epoch
        if fresh:
            self._batch_index = 0
        if self._began:
            self._hook("on_train_epoch_start")
        elif fresh:
            self._training_logs.load_state_dict(self._early.state_dict())
        self._began = True

    def keep_modes(self) -> None:
        """Sets the parts to evaluation mode that were in it before a validation, or before the training."""
        for part in self._evaluating:
            part.training = False

    def before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Calls `on_before_zero_grad`."""
        self._step_rows = 0
        self._hook("on_before_zero_grad", optimizer, rows=1)

    def after_backward(self) -> None:
        """Calls `on_after_backward`."""
        self._hook("on_after_backward", rows=self._last[1].rows if self._last else 1)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Calls `on_before_optimizer_step`."""
        self._hook("on_before_optimizer_step", optimizer, rows=self._step_rows)

    def end_step(self, step: int) -> None:
        """Calls `on_train_batch_end`."""
        self.trainer.global_step = step
        self._end_batch()

    def begin_validation(self) -> None:
        """Sets the module to evaluation mode, and calls `on_validation_start` and `on_validation_epoch_start`."""
        self._note_modes()
        self._module.eval()
        self.trainer.training, self.trainer.validating = False, True
        self._validation_index, self._aside = 0, self._metrics.set_aside(self._training_logs.logged_metrics)
        for hook in ("on_validation_start", "on_validation_epoch_start"):
            self._hook(hook)

    def end_validation_rows(self) -> None:
        """Calls `on_validation_epoch_end`."""
        self._hook("on_validation_epoch_end")

    def end_validation(self, metrics: Mapping[str, float]) -> None:
        """Calls `on_validation_end`, and sets the module to training mode."""
        self._publish(metrics)
        self._hook("on_validation_end")
        self._metrics.reset(self._logs.metrics)
        self._metrics.put_back(self._aside)
        self._module.train()
        self.keep_modes()
        self.trainer.training, self.trainer.validating = True, False
        self._logs = self._training_logs

    def end_epoch(self, record: dict[str, Any]) -> None:
        """Calls `on_train_epoch_end`, and adds what it logs to the record."""
        self._publish(record)
        logged = self._training_logs.metrics
        if overrides(self._module, "on_train_epoch_end"):
            late = self.new_logs("late")
            self._hook("on_train_epoch_end")
            record |= late.over_ranks(self._world)
            self._publish(record)
            self._logs, logged = self._training_logs, logged | late.metrics
        self._metrics.reset(logged)
        self.trainer.current_epoch += 1

    def end_fit(self) -> None:
        """Calls `on_train_end`, `on_fit_end` and `teardown`."""
        self._hook("on_train_end")
        self._hook("on_fit_end")
        self._module.teardown("fit")

    def try_validation(self, batch: Batch) -> None:
        """Validates on the first row, if the training will validate; the metric to stop early by must be logged."""
        if not self._validates:
            return
        step = self.training_step(call_plainly)
        what, hint = f"validation_step of {self.name} failed", "it gets (*inputs, label), as training_step does"
        with refusing(f"{what} on the first row", hint, param="module"), torch.no_grad():
            logs = self.new_logs("val_")
            self.begin_validation()
            loss, _ = step.evaluate(self._module, batch)
            self.end_validation_rows()
            metrics = ({} if loss is None else {"val_loss": float(loss)}) | logs.over_ranks(World())
            self.end_validation(metrics)
        name = self._needs_metric
        if name is not None and name not in metrics:
            what = f"earlyStoppingMetric is {name!r}, which {self.name} does not log"
            hint = f"log it in validation_step; {nearest(name, metrics)}"
            raise ModuleError(what, hint=hint, param="earlyStoppingMetric")

    def state_dict(self) -> dict[str, Any]:
        """Returns counters, metrics, what the module saves, and its plain attributes that the training has changed."""
        return {
            **self._saved.state_dict(),
            "batch_index": self._batch_index,
            "metrics": {path: state[:2] for path, state in self._metrics.states().items()},
            "values": {name: float(value) for name, value in self.trainer.callback_metrics.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, same_ranks: bool) -> None:
        """Restores what `state_dict` returned; states of metrics only if the number of ranks is the same."""
        self._batch_index = state["batch_index"]
        self._publish(state["values"])
        if same_ranks:
            self._metrics.put_back({path: (*of_metric, None) for path, of_metric in state["metrics"].items()})
        self._saved.load_state_dict(state)

    def _hook(self, name: str, *arguments: Any, rows: int | None = None) -> None:
        """Calls a hook of the module. What it logs counts for the rows of a step, or once for each rank."""
        before = self._within_step, self._muted
        self._rows, self._within_step, self._muted = 1 if rows is None else rows, rows is not None, rows == 0
        try:
            if not self._rehearsing:
                with quiet() if rows is None else nullcontext():  # A rank without rows computes metrics, too.
                    getattr(self._module, name)(*arguments)
        finally:
            self._within_step, self._muted = before

    @contextmanager
    def _logging(self, batch: Batch, *, within_step: bool = True) -> Iterator[None]:
        """Context in which values are logged for a batch; those of placeholder rows are dropped."""
        self._rows, self._within_step = batch.rows, within_step
        self._muted = self._rehearsing or not batch.rows
        try:
            # Attributes of a training are left to the module: a counter that differed between ranks would part them.
            restored = [*(() if within_step else self._parts), *self._metrics.collections] if self._muted else []
            with self._metrics.restored(self._muted), unchanged(restored):
                yield
        finally:
            self._muted, self._within_step = False, False

    def _end_batch(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            output, batch, index = last
            with self._logging(batch):
                self._module.on_train_batch_end(output, arguments_of(batch), index)

    def _publish(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self.trainer.callback_metrics[name] = torch.tensor(value)

    def _note_modes(self) -> None:
        self._evaluating = [part for part in self._module.modules() if not part.training]
