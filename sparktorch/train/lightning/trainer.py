"""What `self.trainer` is in a fit: the attributes of Lightning's Trainer that modules read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparktorch.base.world import World

if TYPE_CHECKING:
    import torch

__all__ = ["TrainerView"]

_KNOWN = (
    "current_epoch, global_step, max_epochs, world_size, global_rank, local_rank, is_global_zero, "
    "num_training_batches, estimated_stepping_batches, accumulate_grad_batches, training, validating, sanity_checking, "
    "optimizers, lr_scheduler_configs, callback_metrics, logged_metrics, should_stop, logger"
)


class TrainerView:
    """A view of the training for a LightningModule, with the Trainer's names; only `should_stop` may be set."""

    max_steps = -1
    sanity_checking = testing = predicting = fast_dev_run = barebones = False
    logger = progress_bar_callback = None

    def __init__(self, world: World, *, epochs: int, steps: int, accumulation: int) -> None:
        self.global_rank, self.local_rank, self.world_size = world.rank, world.local_rank, world.world_size
        self.max_epochs, self.accumulate_grad_batches = epochs, accumulation
        self.num_training_batches = steps * accumulation
        self.estimated_stepping_batches = epochs * steps
        self.current_epoch = self.global_step = 0
        self.training, self.validating = True, False
        self.should_stop = False
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.loggers: list[Any] = []

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """The same as `callback_metrics`."""
        return self.callback_metrics

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"self.trainer has no {name!r}: a fit of sparktorch runs without Lightning's Trainer. It has {_KNOWN}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerView:
        return self  # a copy of the module belongs to the same training
