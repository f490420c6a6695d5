"""Configuration checks itself, and says which key to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from sparktorch.base.config import TrainConfig, above, at_least, from_dict
from sparktorch.base.metric_names import best_by_name
from sparktorch.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Section:
    name: str
    size: int = 1
    share: float = 0.5
    label: str | None = None
    flag: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    parts: list[int] | None = None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0])
def test_bounds_refuse_what_is_not_finite_or_too_small(number: float) -> None:
    with pytest.raises(ConfigError, match="x must be at least 1"):
        at_least("x", number, 1)
    with pytest.raises(ConfigError, match="x must be above 0"):
        above("x", number, 0)


def test_values_of_the_right_type_make_a_section() -> None:
    every = {"name": "a", "size": 3, "share": 1, "label": None, "flag": True, "options": {"x": 1}, "parts": [1]}
    for values in ({"name": "a"}, every, {"name": "a", "parts": None, "label": "b"}):
        assert {**asdict(Section(name="a")), **values} == asdict(from_dict(Section, values))


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"name": "a", "sise": 3}, "unknown key data.sise", "did you mean 'size'?"),
        ({}, "missing key data.name", ""),
        ({"name": "a", "size": True}, "data.size must be int, got True (bool)", ""),
        ({"name": "a", "label": 1}, "data.label must be str | None, got 1 (int)", ""),
        ({"name": "a", "parts": [1, "2"]}, "data.parts[1] must be int, got '2' (str)", ""),
        ({"name": "a", "options": {1: 2}}, "data.options.keys() must be str, got 1 (int)", ""),
        ({"name": int}, "data.name must be str, got <class 'int'> (type)", "give its name, 'int'"),
    ],
)
def test_a_wrong_key_is_refused_with_its_section(values: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(Section, values, where="data")
    assert caught.value.what == message
    assert caught.value.hint.startswith(hint)


def test_bounds_refuse_text_in_place_of_a_number() -> None:
    with pytest.raises(ConfigError, match="memory must be a number above 0, got 8GB"):
        above("memory", "8GB", 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("min", "loss val_mae val_RMSE val_mse_0 val_loss_epoch val_nll val_msle val_rmsle val_mase val_ece val_crps"),
        ("min", "val_kl_div val_hamming_distance val_MeanSquaredError val_word_error_rate mlogloss val_brier_score"),
        ("max", "val_accuracy val_f1 val_macro_f1 val_MulticlassF1Score val_ndcg_at_10 val_recall@5 val_auc valAUROC"),
        ("min", "crossentropy loss_mean val_loss2 val_neg_log_likelihood val_NegativeLogLikelihood val_nll_mean"),
        ("max", "val_mIoU val_chrF f1_macro f1_weighted roc_auc_ovr accuracy_score acc1 mAP50 val_mAP_50 rouge1 r2"),
        (None, "val_answer val_score val_shower val_map_of_it rows"),
        (None, "val_neg_mean_squared_error neg_mse negloss val_NegMSE negative_mae neg_log_loss"),
    ],
)
def test_the_last_words_of_a_metric_say_which_value_is_the_best_or_nothing_does(mode: str | None, names: str) -> None:
    assert {name: best_by_name(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


def test_a_name_that_does_not_say_which_value_is_the_best_needs_the_mode() -> None:
    with pytest.raises(ConfigError, match="earlyStoppingMode is 'auto', and 'val_answer' does not say") as caught:
        TrainConfig(best_metric="val_answer").judged({"val_answer": 1.0})
    assert caught.value.hint == "set earlyStoppingMode='min' or 'max'"
    assert TrainConfig(best_metric="val_answer", best_mode="max").judged({"val_answer": 1.0}) == -1.0
