"""What of a LightningModule is refused, by name; and the forms in which it returns optimizer and schedulers."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from sparktorch.adapters.lightning.optimizers import configured
from sparktorch.adapters.lightning.recipe import LightningRecipe
from sparktorch.adapters.lightning.recognise import _REFUSED, check_class
from sparktorch.adapters.lightning.state import TrainerView, unchanged
from sparktorch.adapters.lightning.step import Logs
from sparktorch.base.world import World
from sparktorch.errors import ModuleError
from sparktorch.train.recipe.adapter import adapter_of
from sparktorch.train.recipe.dry_run import dry_run
from sparktorch.train.recipe.recipe import Recipe

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Lightning's own imports
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule

    from sparktorch.train.recipe.trained_parameters import TrainedParameters
from tests.support.lightning_modules import LitMinimal


def test_modules_are_known_by_class_path_and_instance_and_lightning_is_not_imported_for_others() -> None:
    for source in (LitMinimal, LitMinimal(), "tests.support.lightning_modules:LitMinimal"):
        assert adapter_of(source).brings_training
    for other in (torch.nn.Linear, torch.nn.Linear(1, 1), "torch.nn:Linear", "nowhere:Net"):
        assert not adapter_of(other).brings_training
    program = """
import sys, torch
from sparktorch.train.recipe.adapter import adapter_of
assert not adapter_of(torch.nn.Linear(1, 1)).brings_training
print([name for name in sys.modules if "lightning" in name and "sparktorch" not in name])
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_method_that_a_fit_does_not_call_is_refused_by_its_name() -> None:
    check_class(LitMinimal, validated=True)
    for name in _REFUSED:
        kind = type("Own", (LitMinimal,), {name: lambda self: None})
        with pytest.raises(ModuleError, match=f"Own overrides {name}, which a fit does not call"):
            check_class(kind, validated=False)


def test_what_a_fit_needs_is_named() -> None:
    class Empty(LightningModule):
        pass

    for name in ("training_step", "configure_optimizers", "forward"):
        with pytest.raises(ModuleError, match=f"Empty has no {name}"):
            check_class(Empty, validated=False)
        setattr(Empty, name, lambda self, batch: None)
    check_class(Empty, validated=False)
    with pytest.raises(ModuleError, match="Empty has no validation_step"):
        check_class(Empty, validated=True)


def made() -> LitMinimal:
    return LitMinimal()


def test_a_function_that_returns_one_is_refused() -> None:
    with pytest.raises(ModuleError, match="module made returned a LightningModule, whose steps a fit would not call"):
        Recipe(module=made).build_module(0)


def returning(make: Any) -> Any:
    kind = type("Own", (LitMinimal,), {"configure_optimizers": lambda self: make(SGD(self.parameters(), lr=0.1))})
    return configured(kind())


def test_every_form_of_optimizer_and_schedulers_is_read() -> None:
    assert returning(lambda it: it).schedulers == []
    assert returning(lambda it: [it]).schedulers == []
    assert returning(lambda it: {"optimizer": it}).schedulers == []
    (found,) = returning(lambda it: ([it], [StepLR(it, 1)])).schedulers
    assert (found.interval, found.frequency, found.reduce_on_plateau) == ("epoch", 1, False)
    by_step = {"interval": "step", "frequency": 3}
    (found,) = returning(lambda it: ([it], [{"scheduler": StepLR(it, 1), **by_step}])).schedulers
    assert (found.interval, found.frequency) == ("step", 3)
    plateau = {"monitor": "val_loss"}
    (found,) = returning(lambda it: {"optimizer": it, "lr_scheduler": ReduceLROnPlateau(it), **plateau}).schedulers
    assert (found.monitor, found.reduce_on_plateau) == ("val_loss", True)


FORMS: dict[str, tuple[Any, str]] = {
    "two": (lambda it: [it, it], "returned 2 optimizers, and a fit has one"),
    "several passes": (lambda it: torch.optim.LBFGS(it.param_groups[0]["params"]), "returned LBFGS"),
    "no monitor": (lambda it: ([it], [ReduceLROnPlateau(it)]), "must include a monitor"),
    "by step": (
        lambda it: ([it], [{"scheduler": ReduceLROnPlateau(it), "monitor": "val_loss", "interval": "step"}]),
        "looks at its metric after each step",
    ),
}


@pytest.mark.parametrize("case", FORMS)
def test_forms_that_a_fit_cannot_use_are_refused(case: str) -> None:
    make, message = FORMS[case]
    kind = type("Own", (LitMinimal,), {"configure_optimizers": lambda self: make(SGD(self.parameters(), lr=0.1))})
    recipe = LightningRecipe(module=kind, loss=None, stage="fit")
    with pytest.raises(ModuleError, match=rf"(?s)configure_optimizers of Own .*{message}"):
        dry_run(recipe, "generic", 0, {"x": torch.ones(2, 5)}, torch.ones(2))


def test_the_view_of_the_trainer_names_what_it_has() -> None:
    view = TrainerView(World(), epochs=3, steps=7, accumulation=2)
    assert (view.estimated_stepping_batches, view.num_training_batches) == (21, 14)
    with pytest.raises(AttributeError, match=r"self.trainer has no 'datamodule'.* It has current_epoch"):
        view.datamodule  # noqa: B018


class Setup(LitMinimal):
    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.register_buffer("seen", torch.zeros(()))


class PerRow(LitMinimal):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self(batch[0]) - batch[1]) ** 2


def test_what_only_a_dry_run_shows_is_refused() -> None:
    def tried(module: Any, metric: str | None = None, **options: Any) -> None:
        recipe = LightningRecipe(module=module, loss=None, validates=True, stage="fit", needs_metric=metric)
        dry_run(recipe, "generic", 0, {"x": torch.ones(2, 5)}, torch.ones(2), **options)

    with pytest.raises(ModuleError, match=r"setup\('fit'\) and setup\('predict'\) of Setup make another seen"):
        tried(Setup)
    with pytest.raises(ModuleError, match="validation_step of PerRow returns one number for the batch"):
        tried(PerRow, weighted=True)
    with pytest.raises(ModuleError, match=r"(?s)earlyStoppingMetric is 'val_los', which PerRow does not log.*val_loss"):
        tried(PerRow, "val_los")
    tried(PerRow, "val_loss")


def test_parameters_that_a_hook_makes_trainable_are_refused() -> None:
    module = LitMinimal()
    module.head.requires_grad_(False)
    trained = TrainedParameters(module)
    trained.refresh(SGD(module.parameters(), lr=0.1))
    module.head.requires_grad_()
    with pytest.raises(ModuleError, match=r"a hook has set requires_grad of 'head\.bias' during the training"):
        trained.refresh(SGD(module.parameters(), lr=0.1))


def test_a_step_that_does_not_count_leaves_attributes_and_their_items() -> None:
    module: Any = LitMinimal()
    module.rows, module.best, module.means = [1], torch.zeros(1), defaultdict(deque, a=deque([1], maxlen=3))
    rows, best, means = module.rows, module.best, module.means
    with unchanged([module]):
        module.rows.append(2)
        module.means["a"].append(2)
        module.means["b"].append(2)
        module.best, module.late = torch.ones(1), 1
    assert module.rows is rows == [1]
    assert module.best is best
    assert module.means is means == {"a": deque([1])}
    assert (module.means["a"].maxlen, hasattr(module, "late")) == (3, False)


def test_values_are_reduced_as_they_were_logged() -> None:
    logs = Logs(lambda path: 0.0)
    for step, value in enumerate((1.0, 4.0, 2.0)):
        for reduce in ("mean", "sum", "max", "min"):
            logs.log(reduce, torch.tensor(value), 1 + step, reduce=reduce, on_step=True, on_epoch=True, step=step)
    found = logs.over_ranks(World())
    assert [found[name] for name in ("mean", "sum", "max", "min")] == pytest.approx([15 / 6, 7.0, 4.0, 1.0])
    assert [found[f"{name}_step"] for name in ("mean", "sum", "max", "min")] == [2.0] * 4
