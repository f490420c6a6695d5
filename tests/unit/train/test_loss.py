"""One loss per row, whatever the user's loss returns; outputs, labels and metrics of them."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassF1Score

from sparktorch.base.batch import Batch
from sparktorch.base.config import Task
from sparktorch.errors import ColumnError, ConfigError, ModuleError, SparkTorchError
from sparktorch.train.recipe.dry_run import DryRunResult, complete, dry_run
from sparktorch.train.recipe.groups_loss import GroupsLossStep
from sparktorch.train.recipe.loss import Loss, check_mean, full_precision, step_scales, weigh
from sparktorch.train.recipe.metrics import Metrics
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.recipe.task import align, autocast, correct
from tests.support.metrics import Lists, Mean, Rows
from tests.support.nets import Logit, Mlp, Score

OUTPUT = torch.tensor([1.0, 2.0, 4.0])
LABEL = torch.tensor([1.0, 1.0, 1.0])
WEIGHT = torch.tensor([1.0, 2.0, 0.5])
ROWS = (OUTPUT - LABEL) ** 2  # 0, 1, 9


def squares(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label) ** 2


def mean_square(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return squares(output, label).mean()


class OwnLoss(nn.Module):
    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return squares(output, label)


@pytest.mark.parametrize("loss", ["MSELoss", squares, OwnLoss, nn.MSELoss(), "torch.nn.functional:mse_loss"])
def test_losses_per_row_are_summed_by_weight(loss: Any) -> None:
    built = Loss(loss, {})
    assert float(built(OUTPUT, LABEL, None)) == ROWS.sum()
    assert float(built(OUTPUT, LABEL, WEIGHT)) == (ROWS * WEIGHT).sum()


def test_a_mean_counts_for_its_rows_and_takes_no_weights() -> None:
    built = Loss(mean_square, {})
    assert float(built(OUTPUT, LABEL, None)) == pytest.approx(float(ROWS.sum()))
    with pytest.raises(ModuleError, match="returns one number for the batch, so rows cannot be weighted"):
        built(OUTPUT, LABEL, WEIGHT)
    assert float(built(OUTPUT, LABEL, torch.zeros(3))) == 0, "stand-in rows weigh nothing"


@pytest.mark.parametrize(
    ("losses", "refused"),
    [
        ((2.0, 2.0, 1.0, 2.5), False),  # one row and two
        ((2.0, 2.0, 1.0, 2.501), False),  # rounding
        ((0.0, 0.0, 0.0, 1e-7), False),  # of terms that cancel
        ((2.0, 2.1, 1.0, 2.0), False),  # random
        ((math.nan, math.nan, 1.0, 2.0), False),
        ((2.0, 2.0, 1.0, 2.4), True),
        ((2.0, 2.0, 2.0, math.nan), True),  # of rows that do not count
    ],
)
def test_a_loss_is_a_mean_if_it_is_that_of_its_parts_but_for_rounding(losses: Any, refused: bool) -> None:
    found = [torch.tensor(loss) for loss in losses]
    with pytest.raises(ModuleError, match="is no mean over rows") if refused else nullcontext():
        check_mean(found, (1, 2), what="it", param="loss")
    check_mean([loss.expand(3) for loss in found], (1, 2), what="it", param="loss")


class Margin(nn.Module):
    """A loss with a tensor of its own."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.register_buffer("width", torch.tensor([width]))

    def forward(self, output: torch.Tensor, label: torch.Tensor, *sizes: torch.Tensor) -> torch.Tensor:
        return (output - label - self.width).abs()


@pytest.mark.parametrize("given", [(Margin, {"width": 3.0}), (Margin(3.0), {})], ids=["class", "instance"])
def test_the_tensors_of_a_loss_are_where_outputs_are(given: tuple[Any, dict[str, Any]]) -> None:
    of_rows, of_groups = Loss(*given), GroupsLossStep(*given)
    for device in ("cpu", "meta"):
        output, label = OUTPUT.to(device), LABEL.to(device)
        batch = Batch((output,), label, None, 3, names=("x",), sizes=torch.ones(3, dtype=torch.int64, device=device))
        for found in (of_rows.per_row(output, label), of_groups.per_row(nn.Identity(), batch)[0]):
            assert found.device.type == device
            if device == "cpu":
                assert found.tolist() == [3, 2, 0]


def test_a_weight_per_class_is_refused_because_its_sum_over_the_batch_is_not_known() -> None:
    weight = torch.tensor([1.0, 3.0])
    for loss, params in (("NLLLoss", {"weight": weight}), (nn.CrossEntropyLoss(weight=weight), {})):
        with pytest.raises(ModuleError, match="has a weight for each class") as caught:
            Loss(loss, params)
        assert "classWeights" in caught.value.hint
    Loss("CrossEntropyLoss", {"weight": None})


@pytest.mark.parametrize(
    ("loss", "params", "message", "hint"),
    [
        ("CrossEntropy", {}, "loss 'CrossEntropy' is unknown", "did you mean 'CrossEntropyLoss'?"),
        ("MSELoss", {"reduction": "sum"}, "loss MSELoss with reduction 'sum' would make", "that of the mean"),
        ("MSELoss", {"betta": 1}, "loss MSELoss cannot be built", "reduction"),
        (nn.MSELoss(reduction="sum"), {}, "loss MSELoss with reduction 'sum' would make", "that of the mean"),
        (squares, {"beta": 1}, "lossParams are given, but loss is not a class", ""),
    ],
)
def test_a_loss_that_cannot_work_is_refused(loss: Any, params: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ModuleError) as caught:
        Recipe(module=OwnLoss, loss=loss, loss_params=params).build_loss()
    assert caught.value.what.startswith(message)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("loss", "params", "ignored"),
    [
        ("CrossEntropyLoss", {}, -100),
        (nn.NLLLoss(ignore_index=2), {}, 2),
        (nn.functional.cross_entropy, {}, -100),
        ("NLLLoss", {"ignore_index": 1}, 1),
        (lambda output, label: nn.functional.cross_entropy(output, label, ignore_index=1), {}, None),
    ],
)
def test_a_loss_knows_the_label_that_it_leaves_out(loss: Any, params: dict[str, Any], ignored: int | None) -> None:
    assert Loss(loss, params).ignored == ignored


def test_a_loss_that_was_given_as_an_instance_is_left_as_it_was() -> None:
    given = nn.MSELoss()
    Loss(given, {})(OUTPUT, LABEL, WEIGHT)
    assert given.reduction == "mean"


@pytest.mark.parametrize(
    ("task", "output", "label", "shape", "dtype"),
    [
        ("regression", (4, 1), torch.zeros(4), (4,), torch.float32),
        ("regression", (4, 3), torch.zeros(4, 3), (4, 3), torch.float32),
        ("classification", (4, 3), torch.zeros(4, dtype=torch.int64), (4, 3), torch.int64),
        ("classification", (4, 1), torch.zeros(4, dtype=torch.int64), (4,), torch.float32),
        ("generic", (4, 1), torch.zeros(4, dtype=torch.int64), (4, 1), torch.int64),
    ],
)
def test_outputs_and_labels_meet_in_the_shapes_that_losses_expect(
    task: Task, output: tuple[int, ...], label: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found, aligned = align(task, torch.zeros(output), label)
    assert aligned is not None
    assert (tuple(found.shape), aligned.dtype, aligned.shape) == (shape, dtype, label.shape)


def test_a_guess_is_the_best_score_or_the_sign_of_the_one() -> None:
    scores = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    assert correct(scores, torch.tensor([1, 1])).tolist() == [True, False]
    assert correct(torch.tensor([-1.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 0.0])).tolist() == [True, False, True]


def test_padded_encoders_compute_in_bfloat16_what_they_return_in_training() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True), 2)
    rows, padding = torch.randn(3, 4, 8), torch.arange(4) >= torch.tensor([[3], [4], [4]])
    with autocast(torch.device("cpu"), "bf16"):
        expected = encoder(rows, src_key_padding_mask=padding)
        with torch.no_grad():
            found = encoder.eval()(rows, src_key_padding_mask=padding)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_factors_of_all_steps_are_exact_and_take_eight_bytes_each() -> None:
    weights = torch.tensor([3.0, 0.0, 0.1, 1e-300], dtype=torch.float64)
    assert step_scales(weights, 3).tolist() == [3 / 3.0, 0.0, 3 / 0.1, 3 / 1e-300]
    assert step_scales(torch.ones(10**5, dtype=torch.float64), 3).nbytes == 8 * 10**5
    with pytest.raises(ColumnError, match="all rows have the weight 0"):
        step_scales(torch.zeros(3, dtype=torch.float64), 3)


def test_weights_of_labels_may_be_a_list() -> None:
    output, label, weights = torch.randn(4, 2), torch.ones(4, 2), [2.0, 3.0]
    losses = Loss("BCEWithLogitsLoss", {"pos_weight": weights}).per_row(output, label)
    expected = nn.functional.binary_cross_entropy_with_logits(
        output, label, reduction="none", pos_weight=torch.tensor(weights)
    )
    assert torch.equal(losses, expected)


def test_several_values_a_row_are_averaged() -> None:
    output, label = torch.arange(6.0).reshape(3, 2), torch.zeros(3, 2)
    rows = (output**2).mean(1)
    for loss in ("MSELoss", squares):
        assert float(Loss(loss, {})(output, label, None)) == pytest.approx(float(rows.sum()))
        assert float(Loss(loss, {})(output, label, WEIGHT)) == pytest.approx(float((rows * WEIGHT).sum()))


class Gaussian(NamedTuple):
    mu: torch.Tensor
    others: list[torch.Tensor]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_outputs_keep_their_classes_when_they_get_full_precision(dtype: torch.dtype) -> None:
    class Result(OrderedDict[str, torch.Tensor]):
        """A mapping with attributes, as transformers' `ModelOutput` is one."""

        def __getattr__(self, name: str) -> torch.Tensor:
            return self[name]

    values = torch.ones(2, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    gaussian, result = Gaussian(values, [values]), Result(score=values)
    for output in (gaussian, result):
        assert (full_precision(output) is output) is (dtype != torch.bfloat16)
    assert full_precision(gaussian).mu.dtype == full_precision(gaussian).others[0].dtype == wide
    assert isinstance(full_precision(gaussian).others, list)
    assert full_precision(result).score.dtype == wide


def test_losses_of_half_precision_are_summed_in_float32() -> None:
    losses = torch.full((4096,), 2.34375, dtype=torch.bfloat16)
    for weight in (None, torch.ones(4096)):
        total = weigh(losses, 4096, weight, what="it", param="loss")
        assert (total.dtype, float(total)) == (torch.float32, 9600.0)
    assert float(weigh(losses[0], 4097, None, what="it", param="loss")) == 2.34375 * 4097


@pytest.mark.parametrize(
    ("task", "shape", "label", "loss"),
    [
        ("classification", (4, 3, 5), torch.tensor([0, 4, 2, 2]), "CrossEntropyLoss"),
        ("classification", (4, 3, 1), torch.tensor([0, 1, 1, 0]), "BCEWithLogitsLoss"),
        ("regression", (4, 3, 1), torch.tensor([0.5, -1.0, 2.0, 0.0]), "MSELoss"),
        ("regression", (4, 3, 2), torch.arange(8.0).reshape(4, 2), "L1Loss"),
    ],
)
def test_the_loss_of_a_row_is_the_mean_of_those_of_its_members(
    task: Task, shape: tuple[int, ...], label: torch.Tensor, loss: str
) -> None:
    torch.manual_seed(0)
    members, weight = torch.randn(shape), torch.tensor([1.0, 2.0, 0.0, 0.5])
    found = Loss(loss, {})(*align(task, {"members": members}, label), weight)
    of_members = [Loss(loss, {})(*align(task, members[:, place], label), weight) for place in range(shape[1])]
    torch.testing.assert_close(found, torch.stack(of_members).mean())


FEATURES = {"column 'features'": torch.ones(2, 5)}


def trial(module: Any, task: Task, metrics: dict[str, Any]) -> DryRunResult:
    loss = {Mlp: "CrossEntropyLoss", Logit: "BCEWithLogitsLoss", Score: "MSELoss"}[module]
    label = torch.ones(2) if task == "regression" else torch.ones(2, dtype=torch.float64)
    return complete(dry_run(Recipe(module=module, loss=loss), task, 0, FEATURES, label), metrics, task)


def test_what_a_metric_asks_for_is_filled_in_where_it_is_known() -> None:
    given = MulticlassF1Score(num_classes=3)
    metrics = {
        "f1": "F1Score",
        "of_two": {"name": "MulticlassF1Score", "num_classes": 3, "average": "macro"},
        "class": MulticlassF1Score,
        "rows": "tests.support.metrics:Rows",
        "given": given,
    }
    assert trial(Mlp, "classification", metrics).metrics == {
        "f1": {"name": "F1Score", "task": "multiclass", "num_classes": 3},
        "of_two": {"name": "MulticlassF1Score", "num_classes": 3, "average": "macro"},
        "class": {"name": MulticlassF1Score, "num_classes": 3},
        "rows": {"name": "tests.support.metrics:Rows"},
        "given": given,
    }
    assert not given.update_called
    assert trial(Logit, "classification", {"f1": "F1Score"}).metrics == {"f1": {"name": "F1Score", "task": "binary"}}
    assert trial(Score, "regression", {"r2": "R2Score"}).metrics == {"r2": "R2Score"}


@pytest.mark.parametrize(
    ("module", "task", "metrics", "message", "hint"),
    [
        (Score, "regression", {"e": "R2Scor"}, "metric 'R2Scor' is unknown", "did you mean 'R2Score'?"),
        (Score, "regression", {"e": {"name": "R2Score", "power": 2}}, "metric 'e' cannot be built: ValueE", "(adjus"),
        (Score, "regression", {"e": MetricCollection([MeanSquaredError()])}, "metric 'e' is a Metr", "one by one"),
        (Score, "regression", {"loss": "R2Score"}, "metrics cannot hold one named 'loss'", "another name"),
        (Mlp, "classification", {"e": "BinaryF1Score"}, "metric 'e' failed on the first row: ", "(rows, classes)"),
        (Mlp, "classification", {"e": "ConfusionMatrix"}, "metric 'e' gives a tensor of shape (3, 3)", "vectors"),
        (Score, "regression", {"e": Mean()}, "metric 'e' cannot be computed over several workers: Mean keeps", "'cat'"),
        (Score, "regression", {"e": Lists}, "metric 'e' cannot be computed over several workers: Lists keeps", "'cat'"),
    ],
)
def test_a_metric_that_cannot_be_computed_is_refused(
    module: Any, task: Task, metrics: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(SparkTorchError) as caught:
        trial(module, task, metrics)
    assert caught.value.what.startswith(message)
    assert hint in caught.value.hint
    assert caught.value.where == {"param": "metrics"}


def test_without_torchmetrics_the_hint_is_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ConfigError, match="torchmetrics, which cannot be imported") as caught:
        trial(Score, "regression", {"r2": "R2Score"})
    assert caught.value.hint.startswith("pip install sparktorch-estimator[metrics]")
    assert trial(Score, "regression", {}).metrics == {}


def test_an_instance_is_copied_before_it_counts() -> None:
    given = Rows()
    metrics = Metrics({"rows": given}, "regression", "cpu")
    metrics.update(torch.ones(3), torch.ones(3))
    assert metrics.compute() == {"rows": 3.0}
    assert metrics.compute() == {"rows": 0.0}
    assert int(given.rows) == 0
