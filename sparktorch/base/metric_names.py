"""Whether the smallest or the largest value of a metric is the best, by the metric's name."""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["best_by_name"]

_SMALLEST = (
    "loss error error_rate mae mse rmse mape smape wape wmape mdape mase rmsse nrmse msle rmsle medae rse rae "
    "perplexity ppl nll bce cross_entropy crossentropy hinge deviance brier brier_score "
    "ece mce crps wis pinball wer cer mer eer kl kl_div divergence distance hamming fid kid lpips fpr fnr seconds"
)
_LARGEST = (
    "accuracy acc auc auroc auprc ap map precision recall sensitivity specificity tpr tnr "
    "f1 f2 fbeta f_beta f1_score f2_score fbeta_score f_beta_score f_score fscore dice dice_score iou miou jaccard "
    "jaccard_index kappa mcc corrcoef correlation pearson spearman kendall concordance concordance_index c_index "
    "r2 r2_score r_squared explained_variance log_likelihood ndcg dcg mrr reciprocal_rank hit hits hit_rate hit_ratio "
    "exact_match bleu bleu_score rouge rouge_l meteor chrf similarity psnr ssim rows_per_second"
)


def _ending(words: str) -> re.Pattern[str]:
    """Returns a pattern for names that end with one of some words."""
    return re.compile(rf"(^|_)({'|'.join(words.split())})$")


_MODES: tuple[tuple[re.Pattern[str], Literal["min", "max"]], ...] = (
    (_ending(_SMALLEST), "min"),
    (re.compile("(loss|error)$"), "min"),
    (_ending(_LARGEST), "max"),
)
# Words end before a capital letter, unless another one precedes it, and at characters that are no letters or digits.
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
# A name may end with the level, the average or the number of a metric.
_LEVEL = re.compile(r"(_(epoch|step|at|top|k|macro|micro|weighted|mean|ovr|ovo|score)|_?\d+)$")
_LIKELIHOOD = re.compile("neg(ative)?_?log_?likelihood")
_NEGATED = re.compile("(^|_)neg")


def best_by_name(metric: str) -> Literal["min", "max"] | None:
    """Returns whether the smallest or the largest value of a metric is the best; `None` for a name that does not say.

    The name's last words decide, such as in `val_macro_f1`, `val_mse_0`, `val_loss_epoch`, `val_ndcg_at_10`, `val_mIoU`
    or `val_MeanSquaredError`. A negated metric, such as `neg_mse`, does not say; the negative log likelihood is a loss.
    """
    # Capital letters may begin words (`MeanSquaredError`) or not (`mIoU`), so both readings are tried.
    names = [re.sub(separator, "_", metric).strip("_").lower() for separator in (_WORDS, "[^A-Za-z0-9]+")]
    names = [_LIKELIHOOD.sub("nll", name) for name in names]
    if any(map(_NEGATED.search, names)):
        return None
    modes = (_best(name) for name in names)
    return next((mode for mode in modes if mode is not None), None)


def _best(name: str) -> Literal["min", "max"] | None:
    """Returns the same as `best_by_name`, for words in lower case, with or without levels, averages and numbers."""
    shorter = _LEVEL.sub("", name)
    mode = next((mode for ending, mode in _MODES if ending.search(name)), None)
    return mode if mode or shorter == name else _best(shorter)
