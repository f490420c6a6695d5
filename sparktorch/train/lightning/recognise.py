"""Recognises LightningModules by the names of their base classes, and refuses what a fit cannot honour."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import nn

from sparktorch.base.imports import load_object
from sparktorch.errors import ModuleError

__all__ = ["check_class", "check_instance", "is_lightning", "overrides", "parts", "without_trainer"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

_ROWS = "rows come from the DataFrame: prepare them there, or with preprocess"
_OLD = "Lightning 2 does not call it either: use on_{}_epoch_end"
_UPDATE = "on_before_zero_grad and on_before_optimizer_step are called"
_CALLS = "leave it out: sparktorch sets the module's modes and gradients itself"
_REFUSED = {
    "optimizer_step": _UPDATE,
    "optimizer_zero_grad": _UPDATE,
    "lr_scheduler_step": "return a scheduler of torch.optim.lr_scheduler, or change param_groups in a hook",
    "configure_gradient_clipping": "set gradientClipNorm or gradientClipValue",
    "backward": "the gradient is that of the loss that training_step returns",
    "configure_callbacks": "pass sparktorch.Callback instances as callbacks",
    "configure_sharded_model": "use configure_model",
    "prepare_data": _ROWS,
    "train_dataloader": _ROWS,
    "val_dataloader": _ROWS,
    "transfer_batch_to_device": _ROWS,
    "on_before_batch_transfer": _ROWS,
    "on_after_batch_transfer": _ROWS,
    "on_validation_model_eval": _CALLS,
    "on_validation_model_train": _CALLS,
    "on_validation_model_zero_grad": _CALLS,
    "training_step_end": _OLD.format("train"),
    "training_epoch_end": _OLD.format("train"),
    "validation_step_end": _OLD.format("validation"),
    "validation_epoch_end": _OLD.format("validation"),
}


def is_lightning(source: Any) -> bool:
    """Returns whether a module's class, its import path or an instance is a LightningModule; imports no Lightning."""
    if isinstance(source, str):
        try:
            source = load_object(source)
        except ModuleError:  # only the ranks may have it
            return False
    return _base(source if isinstance(source, type) else type(source)) is not None


def _base(kind: type) -> type | None:
    """Returns the LightningModule that a class inherits from, or `None`."""
    for base in kind.__mro__:
        home = base.__module__
        if base.__name__ == "LightningModule" and any(home == p or home.startswith(f"{p}.") for p in _PACKAGES):
            return base
    return None


def parts(module: nn.Module) -> list[nn.Module]:
    """Returns the LightningModules in a module, itself first."""
    return [part for part in module.modules() if _base(type(part)) is not None]


def overrides(source: Any, name: str) -> bool:
    """Returns whether a LightningModule's class, or the instance itself, has its own version of a method."""
    kind = source if isinstance(source, type) else type(source)
    base = _base(kind)
    own = not isinstance(source, type) and name in vars(source)
    return own or getattr(kind, name, None) is not getattr(base, name, None)


def check_class(source: Any, *, validated: bool) -> None:
    """Refuses methods that a fit would not call, and those that it lacks.

    Args:
        source: Import path, class or instance of a LightningModule.
        validated: Whether there are validation rows.

    Raises:
        ModuleError: A method is refused, or missing; names it.
    """
    source = load_object(source) if isinstance(source, str) else source
    kind: Any = source if isinstance(source, type) else type(source)
    for name, hint in _REFUSED.items():
        if overrides(source, name):
            raise ModuleError(
                f"{kind.__qualname__} overrides {name}, which a fit does not call", hint=hint, param="module"
            )
    needs = {"training_step": "it returns the loss", "configure_optimizers": "it returns the optimizer"}
    if validated:
        needs["validation_step"] = "validationIndicatorCol marks rows for it: write it, or leave the Param out"
    for name, hint in needs.items():
        if not overrides(source, name):
            raise ModuleError(f"{kind.__qualname__} has no {name}", hint=hint, param="module")
    if not overrides(source, "forward"):
        raise ModuleError(
            f"{kind.__qualname__} has no forward, with which the fitted model scores",
            hint="predict_step is not called: move what it computes into forward(*inputs)",
            param="module",
        )
    taken = inspect.signature(kind.training_step).parameters
    for argument in ("dataloader_iter", "optimizer_idx"):
        if argument in taken:
            raise ModuleError(
                f"training_step of {kind.__qualname__} takes {argument}, which a fit does not have",
                hint="write training_step(self, batch, batch_idx)",
                param="module",
            )


def check_instance(module: Any) -> None:
    """Refuses manual optimization, which is known of an instance only.

    Raises:
        ModuleError: The module optimizes by itself.
    """
    if not module.automatic_optimization:
        raise ModuleError(
            f"{type(module).__qualname__} sets automatic_optimization = False, and a fit takes the steps itself",
            hint="leave it True and return the loss from training_step; sparktorch.run trains with a loop of your own",
            param="module",
        )


def without_trainer(module: Any) -> Any:
    """Returns a LightningModule that refers to no Trainer, a copy if it did; classes and paths as they are."""
    if not isinstance(module, nn.Module):
        return module
    trainers = [vars(part).get("_trainer") for part in parts(module)]
    left_out: dict[int, Any] = {id(trainer): None for trainer in trainers if trainer is not None}
    return copy.deepcopy(module, left_out) if left_out else module
