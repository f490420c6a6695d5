"""Recognises LightningModules by the names of their base classes, and refuses what a fit cannot honour."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sparktorch.base.imports import load_object
from sparktorch.errors import ModuleError

__all__ = ["base_of", "check_class", "check_instance", "overrides", "parts", "without_trainer"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

_UPDATE = "on_before_zero_grad and on_before_optimizer_step are called"
_LOADERS = ("prepare_data", "train_dataloader", "val_dataloader")
_TRANSFERS = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
_MODES = ("on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad")
_OLD = ("training_step_end", "training_epoch_end", "validation_step_end", "validation_epoch_end")
_REFUSED = {
    "optimizer_step": _UPDATE,
    "optimizer_zero_grad": _UPDATE,
    "lr_scheduler_step": "return a scheduler of torch.optim.lr_scheduler, or change param_groups in a hook",
    "configure_gradient_clipping": "set gradientClipNorm or gradientClipValue",
    "backward": "the gradient is that of the loss that training_step returns",
    "configure_callbacks": "pass sparktorch.Callback instances as callbacks",
    "configure_sharded_model": "use configure_model",
    **dict.fromkeys((*_LOADERS, *_TRANSFERS), "rows come from the DataFrame: prepare them there, or with preprocess"),
    **dict.fromkeys(_MODES, "leave it out: sparktorch sets the module's modes and gradients itself"),
    **dict.fromkeys(_OLD, "Lightning 2 does not call it either: use on_train_epoch_end or on_validation_epoch_end"),
}
_NEEDED = {
    "training_step": "it returns the loss",
    "configure_optimizers": "it returns the optimizer",
    "validation_step": "validationIndicatorCol marks rows for it: write it, or leave the Param out",
    "forward": "the fitted model scores with it: predict_step is not called",
}


def base_of(kind: type) -> type | None:
    """Returns the LightningModule that a class inherits from, or `None`."""
    for base in kind.__mro__:
        home = base.__module__
        is_lightning = any(home == package or home.startswith(f"{package}.") for package in _PACKAGES)
        if base.__name__ == "LightningModule" and is_lightning:
            return base
    return None


def parts(module: nn.Module) -> list[nn.Module]:
    """Returns the LightningModules in a module; the module itself comes first."""
    return [part for part in module.modules() if base_of(type(part)) is not None]


def overrides(source: Any, name: str) -> bool:
    """Whether a LightningModule's class, or the instance itself, has its own version of a method."""
    kind = source if isinstance(source, type) else type(source)
    base = base_of(kind)
    in_instance = not isinstance(source, type) and name in vars(source)
    return in_instance or getattr(kind, name, None) is not getattr(base, name, None)


def check_class(source: Any, *, validated: bool) -> None:
    """Refuses a class that has methods that a fit would not call, or lacks methods that a fit calls.

    A `validated` fit also calls `validation_step`.
    """
    source = load_object(source) if isinstance(source, str) else source
    kind: Any = source if isinstance(source, type) else type(source)
    needed = {name: hint for name, hint in _NEEDED.items() if validated or name != "validation_step"}
    refused = {name: hint for name, hint in _REFUSED.items() if overrides(source, name)}
    wrong = {f"overrides {name}, which a fit does not call": hint for name, hint in refused.items()}
    wrong |= {f"has no {name}": hint for name, hint in needed.items() if not overrides(source, name)}
    if wrong:
        what, hint = next(iter(wrong.items()))
        raise ModuleError(f"{kind.__qualname__} {what}", hint=hint, param="module", code="ST-LIGHTNING")


def check_instance(module: Any) -> None:
    """Refuses manual optimization, which only an instance can say."""
    if not module.automatic_optimization:
        what = f"{type(module).__qualname__} sets automatic_optimization = False, and a fit takes the steps itself"
        hint = "leave it True and return the loss from training_step; sparktorch.run trains with a loop of your own"
        raise ModuleError(what, hint=hint, param="module")


def without_trainer(module: Any) -> Any:
    """Returns a LightningModule without a Trainer: a copy if it had one, else the module; classes and paths stay."""
    if not isinstance(module, nn.Module):
        return module
    trainers = [vars(part).get("_trainer") for part in parts(module)]
    left_out: dict[int, Any] = {id(trainer): None for trainer in trainers if trainer is not None}
    return copy.deepcopy(module, left_out) if left_out else module
