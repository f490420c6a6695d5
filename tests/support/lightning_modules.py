"""LightningModules for ranks: importable, so that they travel by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanAbsoluteError, MeanAbsolutePercentageError, MeanSquaredError, MetricCollection


class LitMinimal(LightningModule):
    """One number a row, and a loss."""

    def __init__(self, inputs: int = 5, hidden: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh())
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(x)).squeeze(-1)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("val_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Lit(LitMinimal):
    """Logs in every way, and has the optimizer and the schedulers that `schedule` names."""

    def __init__(self, schedule: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.error = MeanSquaredError()
        self.groups = MetricCollection([MeanAbsoluteError(), MeanAbsolutePercentageError()])
        self.held_out = MeanAbsoluteError()
        self.kept: list[torch.Tensor] = []
        self.begun = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self.head(self.layers(x)).squeeze(-1)  # not forward: only what is redirected is reduced
        loss = nn.functional.mse_loss(output, y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.log("last_loss", loss)
        self.log("loss", loss)
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("largest", y.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log_dict({"least": y.min()}, reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log("total", y.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.error(output, y)
        self.log("train_error", self.error, on_step=False, on_epoch=True)
        self.log("train_error_too", self.error, on_step=False, on_epoch=True)
        self.groups(output, y)
        self.log_dict(self.groups, on_step=False, on_epoch=True)
        return {"loss": loss, "more": 1}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begun += 1
        self.log("begun", float(self.begun), reduce_fx="max", on_step=False, on_epoch=True)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("step_number", float(self.global_step), on_step=True, on_epoch=True)

    def on_validation_epoch_start(self) -> None:
        self.log("val_begun", float(self.current_epoch))
        self.log("val_rate", self.optimizers().param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append(batch[1])
        self.held_out(self.head(self.layers(batch[0])).squeeze(-1), batch[1])
        self.log("val_error", self.held_out)
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("val_labels", sum((float(labels.sum()) for labels in self.kept), 0.0), reduce_fx="sum")
        self.kept.clear()

    def on_train_epoch_end(self) -> None:
        self.log("computed", self.error.compute())
        self.log("epoch_number", float(self.current_epoch))
        self.log("steps_so_far", float(self.global_step))

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layers.parameters(), "lr": 0.02}, {"params": self.head.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.01)
        kinds = torch.optim.lr_scheduler
        if self.hparams["schedule"] == "step":
            total = self.trainer.estimated_stepping_batches
            schedule = kinds.OneCycleLR(optimizer, max_lr=0.05, total_steps=int(total))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if self.hparams["schedule"] == "part":
            return torch.optim.SGD(self.head.parameters(), lr=0.5)
        if self.hparams["schedule"] == "often":
            schedule = {"scheduler": kinds.StepLR(optimizer, 1, gamma=0.7), "interval": "step", "frequency": 4}
            return [optimizer], [schedule]
        if self.hparams["schedule"] == "epoch":
            return [optimizer], [kinds.StepLR(optimizer, step_size=1, gamma=0.5)]
        if self.hparams["schedule"] == "plateau":
            schedule = kinds.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}
        return optimizer


class LitShared(LitMinimal):
    """Logs one metric in training and validation, which Lightning's Trainer mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.unlogged = MeanSquaredError(), MeanSquaredError()

    def on_validation_epoch_start(self) -> None:
        self.unlogged.compute()

    def on_validation_epoch_end(self) -> None:
        self.log("val_unlogged", self.unlogged.compute())  # computed already: no rank may wait for the others here

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.head(self.layers(batch[0])).squeeze(-1)
        self.unlogged.update(output, batch[1])
        self.error(output, batch[1])
        self.log("train_error", self.error, on_step=False, on_epoch=True)
        return nn.functional.mse_loss(output, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.error(self.head(self.layers(batch[0])).squeeze(-1), batch[1])
        self.log("val_error", self.error)
        return super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("computed", self.error.compute())


class LitDoubled(LitMinimal):
    """Has another validation loss than it returns."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("val_loss", 2 * loss)
        return loss


class LitCounting(Lit):
    """Counts in ways that a checkpoint must hold, drops out, and may kill its process before a step, once."""

    def __init__(self, schedule: str = "", dies: int = -1, flag: str = "") -> None:
        super().__init__(schedule)
        self.save_hyperparameters()
        self.batches = 0
        self.drop = nn.Dropout(0.2)
        self._told = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        flag = Path(self.hparams["flag"])
        if self.global_step == self.hparams["dies"] and self.trainer.is_global_zero and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.batches += 1
        self._told += float(batch_idx)
        x, y = batch
        self.log("batches", float(self.batches), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("told", self._told, reduce_fx="max", on_step=False, on_epoch=True)
        return super().training_step((self.drop(x), y), batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["told"] = self._told

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._told = checkpoint["told"]


class LitHooks(LitMinimal):
    """Writes the names of its hooks, in their order, to a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.save_hyperparameters()


def _noting(name: str, *, places: bool = True) -> Any:
    def hook(self: LitHooks, *arguments: Any, **named: Any) -> None:
        place = f":{self.current_epoch}:{self.global_step}" if places else ""
        given = [getattr(value, "value", value) for value in (*arguments, *named.values())]
        index = "".join(f":{value}" for value in given if isinstance(value, int | str))
        with open(self.hparams["path"], "a") as file:
            file.write(f"{name}{place}{index}:{self.training}\n")

    return hook


for _name in (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
):
    setattr(LitHooks, _name, _noting(_name))
for _name in ("setup", "configure_model", "teardown"):
    setattr(LitHooks, _name, _noting(_name, places=False))
