"""What does not fit together is refused on the driver, in the user's own terms."""

from __future__ import annotations

import linecache
import random
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from sparktorch.base.config import Task
from sparktorch.errors import ModuleError, SparkTorchError, line_of_user
from sparktorch.train.recipe.dry_run import DryRunResult, OutputSpec, dry_run
from sparktorch.train.recipe.groups_loss import GroupsLossStep
from sparktorch.train.recipe.recipe import Recipe
from tests.support.nets import Bias, Logit, Lookup, Mlp, NamedPair, Pair, Score, Spare

FEATURES = {"column 'features'": torch.ones(2, 5)}
PAIR = {"column 'user'": torch.ones(2, 5), "column 'scale'": torch.ones(2)}
CLASS = torch.tensor([1.0, 1.0], dtype=torch.float64)
NUMBER = torch.tensor([1.5, 1.5])


def first_of(output: Any, label: torch.Tensor) -> torch.Tensor:
    values = output["left"] if isinstance(output, dict) else output[0]
    return (values.sum(1) - label) ** 2


def squares(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label) ** 2


def no_loss(output: torch.Tensor, label: torch.Tensor) -> None:
    return None


def good_step(module: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    assert module.training is False
    losses = (module(*batch.inputs).sum(1) - batch.label) ** 2
    return losses, {"error": losses.sqrt(), "rows": batch.rows}


def plain_step(module: nn.Module, batch: Any) -> torch.Tensor:
    return good_step(module, batch)[0]


def mean_step(module: nn.Module, batch: Any) -> torch.Tensor:
    return good_step(module, batch)[0].mean()


def square_step(module: nn.Module, batch: Any) -> torch.Tensor:
    return (module(*batch.inputs).sum(1, keepdim=True) - batch.label) ** 2


def wide_metric_step(module: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return plain_step(module, batch), {"wide": torch.ones(5)}


def failing_step(module: nn.Module, batch: Any) -> torch.Tensor:
    raise KeyError("anchor")


class Chance(Logit):
    """Returns a probability."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(super().forward(x))


class Gaussian(NamedTuple):
    mu: torch.Tensor
    width: torch.Tensor


class HalfGaussian(nn.Linear):
    """Computes in bfloat16, and returns a `NamedTuple`."""

    def __init__(self) -> None:
        super().__init__(5, 2, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> Gaussian:  # type: ignore[override]
        return Gaussian(*super().forward(x.bfloat16()).unbind(1))


def of_gaussian(output: Gaussian, label: torch.Tensor) -> torch.Tensor:
    assert output.mu.dtype == torch.float32
    return (output.mu - label) ** 2 + output.width


class Shares(Mlp):
    """Returns probabilities."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).softmax(1)


def trial(
    module: Any,
    loss: Any,
    task: Task,
    inputs: dict[str, torch.Tensor] = FEATURES,
    label: torch.Tensor | None = NUMBER,
    **recipe: Any,
) -> DryRunResult:
    return dry_run(Recipe(module=module, loss=loss, **recipe), task, 0, inputs, label)


@pytest.mark.parametrize(
    ("module", "loss", "task", "inputs", "label", "outputs", "classes"),
    [
        (Mlp, "CrossEntropyLoss", "classification", FEATURES, CLASS, [OutputSpec("", (3,))], 3),
        (Score, "BCEWithLogitsLoss", "classification", FEATURES, CLASS, [OutputSpec("", ())], 2),
        (Logit, "MSELoss", "regression", FEATURES, NUMBER, [OutputSpec("", (1,))], None),
        (Chance, nn.BCELoss, "generic", FEATURES, torch.ones(2, 1), [OutputSpec("", (1,))], None),
        (Pair, first_of, "generic", PAIR, NUMBER, [OutputSpec("0", (2,)), OutputSpec("1", ())], None),
        (NamedPair, first_of, "generic", PAIR, NUMBER, [OutputSpec("left", (2,)), OutputSpec("total", ())], None),
        (HalfGaussian, of_gaussian, "generic", FEATURES, NUMBER, [OutputSpec("0", ()), OutputSpec("1", ())], None),
        (Mlp, lambda output: output.sum(1), "generic", FEATURES, None, [OutputSpec("", (3,))], None),
    ],
)
def test_what_fits_together_is_described(
    module: Any,
    loss: Any,
    task: Task,
    inputs: dict[str, torch.Tensor],
    label: torch.Tensor | None,
    outputs: list[OutputSpec],
    classes: int | None,
) -> None:
    found = trial(module, loss, task, inputs, label)
    assert list(found.outputs) == outputs
    assert found.classes == classes
    assert found.state_bytes == sum(tensor.nbytes for tensor in module().state_dict().values())
    assert replace(DryRunResult.unpacked(*found.packed()), aligned=(None, None)) == replace(found, aligned=(None, None))


@pytest.mark.parametrize(
    ("task", "label", "loss", "ignored"),
    [
        ("classification", CLASS, nn.CrossEntropyLoss(), None),
        ("classification", CLASS, nn.CrossEntropyLoss(ignore_index=2), 2),
        ("generic", CLASS.long(), nn.CrossEntropyLoss(), -100),
    ],
)
def test_the_label_that_a_loss_leaves_out_is_known_where_a_row_may_have_it(
    task: Task, label: torch.Tensor, loss: Any, ignored: int | None
) -> None:
    found = trial(Mlp, loss, task, label=label)
    assert found.ignored == DryRunResult.unpacked(*found.packed()).ignored == ignored


def test_a_softmax_before_a_loss_that_applies_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    trial(Mlp, "CrossEntropyLoss", "classification", label=CLASS)
    assert not caplog.records
    trial(Shares, "CrossEntropyLoss", "classification", label=CLASS)
    assert "if it ends with a softmax, take that out" in caplog.text


@pytest.mark.parametrize(("module", "unused"), [(Score, False), (Spare, True)])
def test_a_parameter_that_gets_no_gradient_is_noticed(module: Any, unused: bool) -> None:
    assert trial(module, "MSELoss", "regression").unused_parameters is unused


def test_a_module_that_does_not_take_the_columns_is_refused_with_what_arrives() -> None:
    with pytest.raises(ModuleError) as caught:
        trial(Pair, first_of, "generic", {"column 'user'": torch.ones(2, 7), "column 'n'": torch.ones(2).long()})
    assert re.match(
        r"forward of Pair failed on the first row at .*\.py:\d+, '.*': RuntimeError: mat1 and mat2 shapes",
        caught.value.what,
    )
    assert caught.value.hint == (
        "the columns arrive as\n"
        "     argument 0 of forward <- column 'user': float32 of shape (rows, 7)\n"
        "     argument 1 of forward <- column 'n': int64 of shape (rows)"
    )
    with pytest.raises(ModuleError) as caught:
        trial(nn.Conv2d(1, 2, 3), first_of, "generic", {"column 'pixels'": torch.ones(2, 64)})
    assert "by inputShapes={'pixels': [channels, height, width]}" in caught.value.hint


def test_the_line_that_failed_is_the_users_and_no_limit_of_tracebacks_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(text: str) -> None:
        int(text)
        random.choice([])

    def said(text: str) -> str:
        with pytest.raises((ValueError, IndexError)) as caught:
            fails(text)
        return line_of_user(caught.value)

    assert re.fullmatch(r" at .*test_dry_run.py:\d+, 'int\(text\)'", said("x"))
    assert re.fullmatch(r" at .*test_dry_run.py:\d+, 'random.choice\(\[\]\)'", said("1"))  # not of the library's
    monkeypatch.setattr(sys, "tracebacklimit", 1, raising=False)  # users set it, for short tracebacks
    assert "'int(text)'" in said("x")
    monkeypatch.setattr(linecache, "getline", lambda *_: "")  # of a file that is on another host
    assert said("x") == ""


@pytest.mark.parametrize(
    ("module", "loss", "task", "label", "message", "hint"),
    [
        (Bias(trainable=False), "MSELoss", "regression", NUMBER, "the module has no parameters that require a gr", ""),
        (Logit, "CrossEntropyLoss", "classification", CLASS, "returns one score a row", "BCEWithLogitsLoss"),
        (Chance, "BCELoss", "classification", CLASS, "loss BCELoss takes probabilities", "BCEWithLogitsLoss"),
        (
            *(Chance, "torch.nn.functional:binary_cross_entropy", "classification", CLASS),
            *("binary_cross_entropy takes probabilities", "leave the sigmoid out"),
        ),
        (Mlp, "MSELoss", "regression", NUMBER, "loss MSELoss failed on the first row", "float32 of shape (rows, 3)"),
        # torch would broadcast (rows, 1) against (rows,) to (rows, rows) with no more than a warning.
        (
            Logit,
            "MSELoss",
            "generic",
            NUMBER,
            "loss MSELoss failed on the first row: UserWarning: Using a target size",
            "(rows, 1)",
        ),
        (Logit, squares, "generic", NUMBER, "loss squares pairs every row with every other", "unsqueeze"),
        (Mlp, no_loss, "generic", NUMBER, "loss no_loss returned NoneType, which is no tensor", "one loss per row"),
    ],
)
def test_what_does_not_fit_is_refused(
    module: Any, loss: Any, task: Task, label: torch.Tensor, message: str, hint: str
) -> None:
    with pytest.raises(ModuleError) as caught:
        trial(module, loss, task, FEATURES, label)
    assert message in caught.value.what
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("optimizer", "clips", "refused"),
    [
        ("AdamW", False, "'SGD' and 'Adagrad' take"),
        ("SGD", True, "make its table with sparse=False"),
        ("SGD", False, ""),
    ],
)
def test_sparse_gradients_that_a_step_does_not_take_are_refused(optimizer: str, clips: bool, refused: str) -> None:
    recipe = Recipe(module=Lookup, loss="MSELoss", optimizer=optimizer)
    error = pytest.raises(SparkTorchError, match=r"the gradient of 'table.weight' is sparse")
    with error if refused else nullcontext() as caught:
        dry_run(recipe, "regression", 0, FEATURES, NUMBER, clips=clips)
    assert not refused or refused in caught.value.hint


def test_a_sum_is_refused() -> None:
    recipes: list[dict[str, Any]] = [
        {"loss": lambda output, label: squares(output.sum(1), label).sum()},
        {"loss": None, "training_step": lambda module, batch: good_step(module, batch)[0].sum()},
    ]
    for recipe in recipes:
        with pytest.raises(ModuleError, match="is no mean over rows: it is"):
            trial(Mlp, task="generic", **recipe)


def test_rows_with_weights_need_a_loss_for_each() -> None:
    with pytest.raises(ModuleError, match="returns one number for the batch, so rows cannot be weighted"):
        dry_run(Recipe(module=Mlp, loss=None, training_step=mean_step), "generic", 0, FEATURES, NUMBER, weighted=True)


@pytest.mark.parametrize("step", [good_step, plain_step, mean_step, "tests.unit.train.test_dry_run:good_step"])
def test_a_training_step_is_tried_in_place_of_the_loss(step: Any) -> None:
    found = trial(Mlp, None, "generic", training_step=step)
    assert list(found.outputs) == [OutputSpec("", (3,))]
    assert not found.unused_parameters


@pytest.mark.parametrize(
    ("step", "message", "hint"),
    [
        (
            failing_step,
            "trainingStep failing_step failed on the first row: KeyError: 'anchor'",
            "inputs (float32 of shape (rows, 5))",
        ),
        (square_step, "trainingStep square_step pairs every row with every other", "squeeze"),
        (wide_metric_step, "metric 'wide' of trainingStep wide_metric_step returned shape (5,) for 2 rows", ""),
    ],
)
def test_a_training_step_that_cannot_work_is_refused(step: Any, message: str, hint: str) -> None:
    with pytest.raises(ModuleError) as caught:
        trial(Mlp, None, "generic", training_step=step)
    assert caught.value.what.startswith(message)
    assert hint in caught.value.hint


def test_what_a_classifier_returns_must_be_scores() -> None:
    with pytest.raises(ModuleError, match=r"the module returned \(float32 of shape \(rows, 2\), ") as caught:
        trial(Pair, "CrossEntropyLoss", "classification", PAIR, CLASS)
    assert "TorchEstimator" in caught.value.hint


def test_a_scheduler_is_looked_up_and_its_parameters_are_compared() -> None:
    def with_scheduler(name: str, **params: object) -> None:
        trial(Mlp, "CrossEntropyLoss", "classification", label=CLASS, scheduler=name, scheduler_params=params)

    with_scheduler("CosineAnnealingLR")  # T_max is filled in
    with pytest.raises(ModuleError, match="scheduler 'CosineLR' is unknown"):
        with_scheduler("CosineLR")
    with pytest.raises(ModuleError, match=r"scheduler StepLR cannot be built: .*'step_size'") as caught:
        with_scheduler("StepLR", gamma=0.5)
    assert "step_size" in caught.value.hint


def test_labels_out_of_range_are_left_to_the_ranks_that_see_every_row() -> None:
    found = trial(Mlp, "CrossEntropyLoss", "classification", label=torch.tensor([7.0, 7.0], dtype=torch.float64))
    assert found.classes == 3


def test_one_row_is_enough_for_batch_normalisation_and_leaves_no_trace_in_it() -> None:
    norm = nn.BatchNorm1d(5)
    assert trial(nn.Sequential(norm, nn.Linear(5, 1)), "MSELoss", "regression").outputs == (OutputSpec("", (1,)),)
    assert float(norm.num_batches_tracked) == 0


class First(Score):
    """Returns one row of all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:1]


def test_rows_that_a_module_loses_are_no_failure_of_the_loss() -> None:
    with pytest.raises(ModuleError, match=r"forward returned 1 row for 2 rows .*\n.*one row for each row"):
        trial(First, "MSELoss", "regression", FEATURES)


# Without values, which `modelDir` asks for on the driver


def test_a_trial_of_shapes_finds_what_the_trial_with_values_finds() -> None:
    x, label = {"x": torch.ones(2, 5)}, torch.ones(2)
    found, wanted = (dry_run(Recipe(module=Score), "regression", 0, x, label, values=v) for v in (False, True))
    assert (found.outputs, found.arguments, found.state_bytes) == (wanted.outputs, wanted.arguments, wanted.state_bytes)
    assert [type(tensor) for tensor in found.aligned] == [torch.Tensor, torch.Tensor]  # for metrics
    assert all((tensor > 0).all() for tensor in found.aligned if tensor is not None)


def test_jagged_rows_are_tried_with_values_only() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ModuleError, match=r"column 'x' is jagged.*\n.*dryRun='worker' tries values"):
        dry_run(Recipe(module=nn.Identity), "generic", 0, {"column 'x'": jagged}, None, values=False)


class Looks(Score):
    """Looks at its values when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]


class Waves(Score):
    """Computes a buffer when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.arange(5.0).sin())


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Looks, r"Looks cannot be built: .*meta tensors(.*\n)+.*made by NumPy or device='cpu' has values"),
        (Waves, r"'waves' has no value: no reset_parameters.*\n.*reset_parameters\(\) of Waves"),
    ],
)
def test_what_constructors_compute_is_refused(module: type[nn.Module], said: str) -> None:
    with pytest.raises(ModuleError, match=said):
        dry_run(Recipe(module=module), "regression", 0, {"x": torch.ones(2, 5)}, torch.ones(2), values=False)


class Scaled(nn.Module):
    """A loss with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output * self.scale - label) ** 2


class Centred(nn.Module):
    """A loss that keeps the mean of the labels."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self.centre.lerp_(label.mean().detach(), 0.1)
        return (output - label) ** 2 + self.centre


class Cached(nn.Module):
    """A loss that makes a buffer when it is first called, and has one with a NaN."""

    smoothed: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BCEWithLogitsLoss(pos_weight=torch.ones(()))
        self.register_buffer("missing", torch.tensor(float("nan")))

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "smoothed"):
            self.register_buffer("smoothed", torch.tensor(0.5))
        loss: torch.Tensor = self.inner(output, label * self.smoothed)
        return loss


class Hidden(Score):
    """Has a layer in a list, of which no optimizer hears."""

    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Linear(5, 5)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.more[0](x))


def of_groups(output: torch.Tensor, label: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return SCALED(output, label)


SCALED = Scaled()


def step_with_scale(module: nn.Module, batch: Any) -> torch.Tensor:
    return SCALED(module(*batch.inputs), batch.label)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"loss": Scaled}, "loss Scaled uses a parameter of shape () that is none of the module's"),
        ({"loss": SCALED}, "loss Scaled uses a parameter of shape ()"),
        ({"loss": None, "training_step": step_with_scale}, "trainingStep step_with_scale uses a parameter of shape ()"),
        ({"loss": None, "training_step": GroupsLossStep(of_groups)}, "loss of_groups uses a parameter of shape ()"),
        ({"module": Hidden}, "loss MSELoss uses a parameter of shape (5, 5)"),
        ({"loss": Centred}, "loss Centred updates a buffer of its own, which no checkpoint"),
    ],
)
def test_what_a_loss_would_have_to_train_or_to_save_is_refused(recipe: dict[str, Any], says: str) -> None:
    grouped = isinstance(recipe.get("training_step"), GroupsLossStep)
    with pytest.raises(ModuleError, match=re.escape(says)) as caught:
        dry_run(
            Recipe(**{"module": Score, "loss": "MSELoss", **recipe}), "regression", 0, FEATURES, NUMBER, grouped=grouped
        )
    assert "put what holds it into the module" in caught.value.hint


def test_a_loss_may_have_frozen_parameters_and_buffers() -> None:
    frozen = Scaled().requires_grad_(False)
    for loss in (frozen, Cached(), nn.BCEWithLogitsLoss(pos_weight=torch.ones(()))):
        dry_run(Recipe(module=Score, loss=loss), "regression", 0, FEATURES, NUMBER)
