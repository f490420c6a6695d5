"""The k best candidates of each row by products of vectors: exact, in blocks, without Spark."""

from __future__ import annotations

import torch

__all__ = ["NOTHING", "block_rows", "top_k"]

NOTHING = float("-inf")  # This is the score of an id that is no candidate.

_GROUP = 64
_BLOCK_BYTES = 2 << 20  # A core keeps about so much in its cache.


def block_rows(candidates: int) -> int:
    """Returns how many rows to score at a time, so that their scores stay in a core's cache."""
    return max(1, _BLOCK_BYTES // (4 * max(1, candidates)))


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k largest scores of each row and their columns, best first; of equal ones, the first column's.

    Scores are float32 of shape `(rows, columns)`, none of them NaN; both results have `min(k, columns)` columns.
    `torch.topk` breaks ties as it likes, and orders all columns. Here, the k best groups of columns, each by its best,
    hold the k best columns.
    """
    rows, columns = scores.shape
    k, groups = min(k, columns), -(-columns // _GROUP)
    if groups * _GROUP != columns:
        scores = torch.nn.functional.pad(scores, (0, groups * _GROUP - columns), value=NOTHING)
    grouped = scores.view(rows, groups, _GROUP)
    best = _ordered(grouped.amax(2)).topk(min(k, groups), dim=1, sorted=False).values
    # Groups are sorted by column, so that of equal scores the first column's stays first.
    chosen = _columns(best).sort(1).values
    candidates = grouped.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
    positions = _columns(_ordered(candidates).topk(k, dim=1).values)
    return candidates.gather(1, positions), chosen.gather(1, positions // _GROUP) * _GROUP + positions % _GROUP


def _ordered(scores: torch.Tensor) -> torch.Tensor:
    """Returns int64 numbers ordered as scores, and those of equal scores, by column from the last to the first."""
    bits = (scores + 0.0).view(torch.int32)  # Adding zero makes 0.0 of -0.0, whose bits differ.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (0xFFFFFFFF - torch.arange(scores.shape[1]))


def _columns(ordered: torch.Tensor) -> torch.Tensor:
    return 0xFFFFFFFF - (ordered & 0xFFFFFFFF)
